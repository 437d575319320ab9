"""The flags of a run on many devices, and what is wrong with them. Runs: `tests/integration/test_distributed.py`."""

import pytest

from lowtide.cli import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--coordinator", "a:1"], "the flags of several processes need --distributed"),
        (["--distributed", "--process-id", "0"], "--coordinator, --num-processes is missing"),
        (["--distributed", "fsdp"], "--distributed: 'fsdp' is not a mesh axis"),
        (["--distributed", "model=2"], "hint: use, for instance, --distributed fsdp=4,tensor=2"),
        (["--distributed", "context=2,context=4"], "--distributed: 'context=4' is not a mesh axis"),
    ],
)
def test_flags_that_make_no_sense_are_errors(flags, said, tmp_path, capfd):
    assert main(["finetune", "--out", str(tmp_path / "run"), *flags]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
