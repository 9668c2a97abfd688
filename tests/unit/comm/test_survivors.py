from daso.comm.health import survivors
from daso.comm.mpi import load


def test_a_loss_is_told_from_other_errors_also_where_it_is_the_cause():
    mpi = load()
    loss = mpi.Exception(mpi.ERR_PROC_FAILED)
    assert survivors.is_loss(loss)
    assert not survivors.is_loss(mpi.Exception(mpi.ERR_TRUNCATE))
    assert not survivors.is_loss(ValueError("the disk is on fire"))
    outer = ValueError("an exchange failed")
    outer.__cause__ = mpi.Exception(mpi.ERR_REVOKED)
    assert survivors.is_loss(outer)


def test_nobody_is_lost_here_and_only_open_mpi_with_ulfm_goes_on(monkeypatch):
    assert not survivors.lost(load().COMM_WORLD)
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    assert "needs Open MPI 5 or later, started by `mpirun --with-ft ulfm`" in survivors.problem()
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    assert survivors.problem() is None
