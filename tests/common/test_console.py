"""Lines without a terminal, Ctrl-C, a full disk, and folders that hold something else."""

import errno
from pathlib import Path

import pytest
import torch
from dflash_hub.common.console import SteadyProgress, duration, interruptible, run_plainly
from dflash_hub.common.files import new_folder, refuse_other_content, writing
from dflash_hub.hub_files import write_text
from safetensors.torch import save_file


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys):
    with SteadyProgress("{task.description}", every=0.0) as bar:
        task = bar.add_task("turn 1", total=4, speed=7.0)
        bar.advance(task, 2)
    assert capsys.readouterr().err.startswith("turn 1: 2 of 4 after 0 s, 7 tokens/s")
    with SteadyProgress("{task.description}") as bar:
        bar.advance(bar.add_task("turn 1", total=4), 4)
    assert capsys.readouterr().err == ""
    assert [duration(seconds) for seconds in (40, 600, 9000)] == ["40 s", "10 min", "2.5 h"]


def test_an_interruption_says_where_it_stopped_and_how_to_go_on(capsys):
    with pytest.raises(SystemExit) as ended, interruptible(lambda: "3 answers are there. Go on with: again"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ndflash-hub: stopped. 3 answers are there. Go on with: again\n"


def on_a_full_disk(what: str):
    """What really happens where nothing can be written."""
    if what == "python":
        with open("/dev/full", "w") as file:
            file.write("x")
    elif what == "torch":
        torch.save({"x": torch.zeros(2**16)}, "/dev/full")
    else:
        raise RuntimeError("writing failed") from OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("what", ["python", "torch", "caused"])
def test_a_full_disk_ends_in_a_sentence_with_the_path(what, tmp_path, capsys):
    def command():
        with writing(tmp_path / "run"):
            on_a_full_disk(what)

    with pytest.raises(SystemExit) as ended:
        run_plainly(command)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"dflash-hub: the disk is full: {tmp_path / 'run'} could not be written. Free some space, and run the command again.\n"
    )

    def in_a_folder():
        with new_folder(tmp_path / "made"):
            on_a_full_disk(what)

    with pytest.raises(SystemExit):
        run_plainly(in_a_folder)
    assert f"the disk is full: {tmp_path / 'made'} could not" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_system_name_their_file_first(tmp_path, capsys):
    for act, sentence in (
        (lambda: (tmp_path / "none").read_text(), f"there is no file {tmp_path / 'none'}."),
        (lambda: tmp_path.read_text(), f"{tmp_path}: Is a directory."),
    ):
        with pytest.raises(SystemExit):
            run_plainly(act)
        assert capsys.readouterr().err == f"dflash-hub: {sentence}\n"
    with pytest.raises(RuntimeError, match="a bug"):
        run_plainly(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


def test_a_folder_that_holds_something_else_is_not_filled(tmp_path):
    refuse_other_content(tmp_path / "new", "run.yaml")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".lock").touch()
    refuse_other_content(tmp_path / "d", "run.yaml")
    save_file({"x": torch.zeros(1)}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"d holds something else \(model.safetensors\); pass a new or an empty folder"
    ):
        refuse_other_content(tmp_path / "d", "run.yaml")
    (tmp_path / "d" / "run.yaml").touch()
    refuse_other_content(tmp_path / "d", "run.yaml")
    with pytest.raises(ValueError, match="is a file; pass a folder"):
        refuse_other_content(tmp_path / "d" / "run.yaml", "run.yaml")


def test_a_text_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "a", "one")
    with pytest.raises(OSError):
        write_text(tmp_path / "nowhere" / "a", "two")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a"]
