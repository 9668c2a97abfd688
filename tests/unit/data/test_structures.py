from daso.data import make_lists

ANSWERS = {
    10: max,
    11: min,
    12: lambda digits: max(digits) - min(digits),
    13: lambda digits: len(digits) % 10,
}


def test_the_answer_of_a_list_is_what_its_operation_gives():
    asked = set()
    for one in make_lists(400, seed=3):
        operation, *digits = one.tokens.tolist()
        assert one.answer.tolist() == [ANSWERS[operation](digits)]
        asked.add((operation, len(digits)))
    assert asked == {(operation, length) for operation in ANSWERS for length in range(1, 11)}
