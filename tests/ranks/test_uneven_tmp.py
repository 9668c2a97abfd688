import time, pytest, torch
from torch import nn
import daso
from daso.errors import ExchangeError
pytestmark = pytest.mark.mpi
@pytest.mark.parametrize("early", [0, -1])
@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("policy", [daso.Fixed(1,0), daso.Fixed(4,1), daso.Fixed(2,2), daso.Auto()], ids=repr)
def test_uneven(topology, place, policy, early, more):
    torch.manual_seed(0); model = nn.Linear(4,2)
    opt = daso.DASO(torch.optim.SGD(model.parameters(), lr=.1), module=model, topology=topology, policy=policy)
    def step():
        opt.zero_grad(); model(torch.randn(3,4)).sum().backward(); opt.step()
    for _ in range(5): step()
    if place.size==1: return
    who = early % place.size
    t=time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank \d+ took \d+ .*rank \d+ took \d+") as caught:
        if place.rank != who:
            for _ in range(more): step()
        opt.synchronize()
    assert time.monotonic()-t < 8
    print(place.rank, caught.value)
