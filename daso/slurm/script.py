"""The batch script: a pure function of a job and a template."""

from typing import Any

from daso.errors import ConfigError
from daso.slurm.job import Job, options, quote
from daso.slurm.rank_entry import REQUEUE
from daso.version import __version__

__all__ = ["render"]


def _keys(job: Job) -> dict[str, Any]:
    """Return what a template may use."""
    values = {name: getattr(job, name) for name in options()}
    return values | {
        "command": " ".join(map(quote, job.command())),
        "directives": job.directives(),
        "folder": quote(str(job.folder)),
        "launcher": str(job.launcher),
        "by_mpirun": job.launcher.by_mpirun,
        "ranks": job.ranks,
        "requeue": REQUEUE,
        "site": job.site,
        "size": job.size,
        "variables": job.variables(),
        "version": __version__,
        "why": job.launcher.why,
    }


def render(job: Job, template: str, *, name: str) -> str:
    """Return the batch script."""
    from jinja2 import Environment, StrictUndefined, meta

    engine = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    keys = _keys(job)
    try:
        unknown = sorted(meta.find_undeclared_variables(engine.parse(template)) - keys.keys())
        if not unknown:
            return engine.from_string(template).render(keys)
    except Exception as error:  # a template is a program: it may raise anything
        where = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ConfigError(
            f"a template must be Jinja text, but {name}{where}: {_one_line(str(error))}; mend it"
        ) from error
    raise ConfigError(
        f"a template may use only keys that there are, but {name} uses {', '.join(unknown)}; the "
        f"keys are {', '.join(sorted(keys))}"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
