"""What must hold on every cut into nodes, on every cut: of two, three and four ranks.

The tests themselves run on equal nodes, see support/worlds.py; these are their bodies.
"""

import inspect

import pytest
import torch
from models import Odd, adam, adamw, many, mlp, nesterov, sgd
from world import (
    test_behaviour,
    test_interactions,
    test_parameter_server,
    test_priority,
    test_state,
    test_sync,
    test_tuning,
)
from worlds import EVERY, EVERYDAY

import daso

PRIORITY = test_priority.FREE["priority"]
HOST = test_priority.FREE["host"]
OURS = ("topology", "rank_info")
SYNCHRONOUS, BACKGROUND = daso.Fixed(1, 0), daso.Fixed(4, 1)

CASES = {
    # gradients
    "synchronous": (test_sync.test_synchronous_steps_equal_one_process_bit_for_bit, Odd, adamw),
    "many tensors": (test_sync.test_synchronous_steps_equal_one_process_bit_for_bit, many, sgd),
    "bucket sizes": (test_sync.test_any_bucket_and_chunk_size_gives_the_same_bits, 7),
    "sums by MPI": (
        test_sync.test_iallreduce_stays_near_the_oracle_and_identical,
        *(torch.float64, "bucketed"),
    ),
    "rows cut anew": (
        test_tuning.test_rows_cut_anew_at_every_step_change_no_bit,
        *(Odd, adamw, SYNCHRONOUS, False),
    ),
    "means": (test_behaviour.test_gradients_are_the_nodes_mean_when_backward_returns,),
    "clipping": (test_behaviour.test_clipping_sees_the_mean_gradient,),
    "accumulation": (test_behaviour.test_accumulation_without_sync_averages_the_sum_once,),
    "no backward": (test_behaviour.test_a_rank_that_did_no_backward_joins_with_zeros,),
    "unused": (test_behaviour.test_a_parameter_that_no_rank_used_keeps_no_gradient,),
    "shared weights": (
        test_behaviour.test_checkpoints_of_shared_weights_give_the_mean_gradient,
        True,
    ),
    # gradients that cross in portions, or are added on the host
    "portions": (
        test_priority.test_no_order_and_no_cut_changes_a_bit,
        *((Odd, sgd, 400), "layer", "layerwise"),
    ),
    "portions, phases": (
        test_priority.test_phases_change_between_synchronous_and_local,
        *(PRIORITY, "layerwise"),
    ),
    "portions, flushed": (
        test_priority.test_every_step_equals_one_process_once_it_is_flushed,
        *(PRIORITY, Odd, sgd),
    ),
    "host, flushed": (
        test_priority.test_every_step_equals_one_process_once_it_is_flushed,
        *(HOST, Odd, sgd),
    ),
    "host, accumulated": (
        test_priority.test_loops_of_all_kinds_see_what_they_saw,
        *(HOST, Odd, sgd, test_priority.accumulate),
    ),
    # deltas
    "in the background": (
        test_sync.test_skipping_equals_one_process_bit_for_bit,
        *(daso.Fixed(3, 3), "bf16", "daso"),
    ),
    "delta": (
        test_sync.test_skipping_equals_one_process_bit_for_bit,
        *(BACKGROUND, "bf16", "delta"),
    ),
    "blocking": (
        test_sync.test_skipping_equals_one_process_bit_for_bit,
        *(daso.Fixed(2, 0), "fp32", "delta"),
    ),
    "nesterov": (
        test_sync.test_an_outer_optimizer_equals_one_process,
        *(daso.Fixed(3, 3), nesterov, "auto", 3),
    ),
    "outer adam": (
        test_sync.test_an_outer_optimizer_equals_one_process,
        *(daso.Fixed(2, 0), adam, 0.25, 1),
    ),
    "fragments": (
        test_sync.test_fragments_that_take_turns_equal_one_process,
        *((Odd, daso.Fixed(3, 1, warmup=2), 9), "bf16", "eager", 7),
    ),
    "odd parameters": (test_sync.test_odd_parameters_skip_alike, "bf16"),
    "drained": (test_sync.test_odd_parameters_drain_alike, "daso"),
    "the paper's phases": (test_sync.test_the_papers_phases_equal_one_process,),
    "small wires": (test_behaviour.test_a_small_wire_never_freezes_a_weight, BACKGROUND, "daso"),
    "chunks": (test_behaviour.test_a_tensor_of_any_number_of_chunks_is_exchanged, BACKGROUND, 513),
    "bytes": (test_behaviour.test_bytes_between_nodes_are_what_the_wire_promises,),
    "one shape": (
        test_behaviour.test_every_shape_of_nodes_trains_to_the_same_model_when_synchronous,
    ),
    # state
    "resumed": (
        test_state.test_a_run_resumed_anywhere_has_the_same_bits,
        *(daso.Fixed(3, 1, warmup=4), 2, "int4", {"wire": "int4", "merge": "delta"}),
    ),
    "resumed in flight": (
        test_state.test_a_run_resumed_right_after_a_send_may_stop_there,
        *("topk", nesterov),
    ),
    "other nodes' state": (test_interactions.test_state_of_two_nodes_loads_into_one_and_back,),
    "wrapping": (test_behaviour.test_wrapping_changes_nothing_but_makes_all_ranks_equal_to_rank_0,),
    "buffers": (test_behaviour.test_batchnorm_statistics_are_equal_and_the_mean_of_all_ranks,),
    "grid": (test_behaviour.test_epochs_of_any_length_keep_the_grid,),
    "added later": (test_behaviour.test_parameters_added_mid_run_are_exchanged_too,),
    "unfrozen": (test_behaviour.test_layers_unfrozen_and_frozen_mid_run_are_followed,),
    "alone": (test_sync.test_one_rank_is_the_bare_optimizer_bit_for_bit, BACKGROUND),
    # the server
    "server": (
        test_parameter_server.test_without_staleness_every_step_equals_one_process,
        *(Odd, test_parameter_server.sgd, 2, 100),
    ),
    "server, own rows": (
        test_parameter_server.test_local_rows_equal_one_process_too,
        Odd,
        test_parameter_server.sgd,
    ),
    "server, replayed": (
        test_parameter_server.test_a_replay_gives_the_same_bits,
        *("sharded", None, (mlp, adamw), 1),
    ),
}


@pytest.mark.also_real
@pytest.mark.nodes(EVERYDAY, *(one for one in EVERY if one != EVERYDAY))
@pytest.mark.parametrize("case", CASES)
def test_it_holds(topology, case):
    body, *values = CASES[case]
    names = [name for name in inspect.signature(body).parameters if name not in OURS]
    given = dict(zip(names, values, strict=True))
    if "rank_info" in inspect.signature(body).parameters:
        given["rank_info"] = topology.rank_info
    body(topology=topology, **given)
