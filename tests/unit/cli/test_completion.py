"""`daso complete`: asked as a shell asks it."""

import shutil
import subprocess
import sys

import pytest
from jobs import typed

pytest.importorskip("shtab")


def completed(script, *words):
    """Return what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    asked = (
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        'COMP_LINE="${COMP_WORDS[*]}"; _shtab_daso daso "${COMP_WORDS[COMP_CWORD]}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    done = subprocess.run(
        [bash, "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_bash_offers_commands_options_settings_and_what_they_may_be():
    done = typed("complete", "bash")
    assert done.returncode == 0, done.stderr
    assert {"run", "train", "submit", "complete"} <= completed(done.stdout, "daso", "")
    assert completed(done.stdout, "daso", "tr") == {"train", "trace"}
    assert "--ranks-per-node" in completed(done.stdout, "daso", "run", "--ran")
    offered = completed(done.stdout, "daso", "train", "--checkpoint.")
    assert {"--checkpoint.every", "--checkpoint.background"} <= offered
    assert "int8" in completed(done.stdout, "daso", "train", "--wire", "in")


def test_bash_offers_files_where_no_word_of_ours_fits(tmp_path):
    (tmp_path / "train.py").touch()
    script = typed("complete", "bash").stdout
    assert f"{tmp_path}/train.py" in completed(script, "daso", "run", f"{tmp_path}/tr")
    assert "complete -o bashdefault -o default -F _shtab_daso daso" in script


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_too(shell):
    done = typed("complete", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--wire" in done.stdout


def test_unknown_shell_and_missing_library_are_reported(monkeypatch):
    assert "invalid choice: 'fish'" in typed("complete", "fish").stderr
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = typed("complete", "bash")
    assert done.returncode == 2
    assert "pip install shtab" in done.stderr
