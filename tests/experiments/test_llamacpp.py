"""`make engines` without the engine: what it compares it sees, and a server that does not start is told with its log."""

import stat
import sys
import urllib.request
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from dflash_hub.experiments.llamacpp import judge, judge_quantized, named_parts, served_gap
from dflash_hub.experiments.llamacpp_files import differences
from dflash_hub.experiments.llamacpp_server import serving

FAKE = """#!{python}
import http.server, os, signal, sys
print("starting", *sys.argv[1:], flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
if "--broken" in sys.argv:
    sys.exit("no such model")
if "--illegal" in sys.argv:
    os.kill(os.getpid(), signal.SIGILL)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def record(method, number, rounds, same=True, gap=None, totals=None, ids=()):
    place = {"method": method, "set": "s", "id": f"p{number}", "turn": 0, "new_ids": list(ids)}
    return place | {"rounds": rounds, "round_totals": totals, "same_text": same} | ({} if same else {"tie_gap": gap})


def judged(*served):
    """Ours makes ten rounds of three tokens in each text; `served` says how the server did."""
    records = [record("ours", number, [3] * 10) for number in range(len(served))]
    records += [record("plain", number, []) for number in range(len(served))]
    records += [record("drafted", number, [], **answer) for number, answer in enumerate(served)]
    return judge("row", records)


def test_texts_and_acceptance_are_judged_prompt_by_prompt():
    same, fewer, more = {"totals": [30, 10]}, {"totals": [300, 104]}, {"totals": [300, 96]}
    rows, faults = judged(same, same)
    assert faults == [] and rows[-1] == ["row", "all 2 with the same text", "", "3.00", "3.00"]
    assert rows[0] == ["row", "s p0 0", "the same", "3.00", "3.00"]
    # Faults that even out over the prompts.
    rows, faults = judged(fewer, more)
    assert rows[-1][-1] == "3.00" and faults == [
        "row, s p0 0: acceptance length 2.88 there, 3.00 here",
        "row, s p1 0: acceptance length 3.12 there, 3.00 here",
    ]
    assert judged(same, {"totals": [300, 102]})[1] == []
    # A tie is told, and its rounds are not compared; another text is a fault.
    rows, faults = judged(same, {"same": False, "gap": 9e-5, "totals": [10, 10]})
    assert faults == [] and rows[1][2] == "a tie, 9.0e-05" and rows[-1][1] == "all 1 with the same text"
    _, faults = judged(same, {"same": False, "gap": 2e-4, "totals": [30, 10], "ids": [7]})
    assert faults == ["row, s p1 0: another text with its drafter, where plain's two best scores are 2.0e-04 apart"]
    assert "with its drafter and without" in judged(same, {"same": False, "gap": 2e-4, "totals": [30, 10]})[1][0]
    assert judged({"same": False, "gap": 1e-5, "totals": [30, 10]})[1] == ["row: no text is the same"]


def test_a_quantized_target_is_judged_by_its_own_text():
    rows, faults = judge_quantized("q4", [("a", None, [40, 38]), ("b", 5e-5, [40, 40])])
    assert faults == [] and rows[0] == ["q4", "a", "the same (llama.cpp alone)", "", "1.05"]
    assert rows[1][2] == "a tie, 5.0e-05 (llama.cpp alone)"
    _, faults = judge_quantized("q4", [("a", 0.2, [40, 38]), ("b", None, None)])
    assert [fault.split(": ")[1][:21] for fault in faults] == ["another text than wit", "nothing was drafted"]


def test_the_gap_of_a_served_text_is_asked_for_where_it_parts():
    asked = []

    def request(path, body):
        asked.append(body)
        best = [{"id": 5, "logprob": -0.5}, {"id": 6, "logprob": -0.75}]
        return {"completion_probabilities": [{"top_logprobs": best}]}

    server = SimpleNamespace(request=request)
    assert served_gap(server, [1, 2], [3, 4, 5], [3, 4, 6]) == 0.25
    served_gap(server, [1, 2], [3, 4, 5], [3, 4])
    assert [body["prompt"] for body in asked] == [[1, 2, 3, 4]] * 2


def test_an_option_of_several_parts_has_all_of_them():
    assert named_parts("q4.gguf,folder", "FILE,FOLDER") == ["q4.gguf", "folder"]
    for text in ("q4.gguf", "q4.gguf,", "q4.gguf,folder,more"):
        with pytest.raises(ValueError, match=f"'{text}' is not FILE,FOLDER"):
            named_parts(text, "FILE,FOLDER")


def written(path, block=8, value=1.0, name="a drafter", bos=None, more=None):
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_name(name)
    writer.add_uint32("dflash.block_size", block)
    if bos is not None:
        writer.add_add_bos_token(bos)
    if more is not None:
        writer.add_bool(more, True)
    writer.add_tensor("fc.weight", np.full((2, 32), value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_differences_of_two_files_are_seen(tmp_path):
    ours = written(tmp_path / "ours.gguf", bos=False)
    assert differences(ours, written(tmp_path / "theirs.gguf", name="another")) == []
    assert differences(ours, written(tmp_path / "theirs.gguf", bos=True)) == [
        "tokenizer.ggml.add_bos_token: False here, True there"
    ]
    more = written(tmp_path / "theirs.gguf", bos=False, more="dflash.sample_from_anchor")
    assert differences(ours, more, ("dflash.sample_from_anchor",)) == []
    assert differences(ours, more) == ["dflash.sample_from_anchor: None here, True there"]
    assert differences(ours, written(tmp_path / "theirs.gguf", block=16)) == ["dflash.block_size: 8 here, 16 there"]
    assert differences(ours, written(tmp_path / "theirs.gguf", value=2.0)) == ["fc.weight holds other values"]


def test_a_server_runs_while_the_block_does_and_one_that_does_not_start_is_told(tmp_path):
    server = tmp_path / "server"
    server.write_text(FAKE.format(python=sys.executable))
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    with serving(server, ["-m", "t.gguf"], tmp_path / "log") as url:
        assert urllib.request.urlopen(f"{url}/health").read() == b"ok"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=5)
    assert "-np 1 -m t.gguf" in (tmp_path / "log").read_text()
    for option, sentence in (
        ("--broken", "stopped; its log .*\n.*\nno such model"),
        ("--illegal", "stopped by SIGILL; its log"),
    ):
        with pytest.raises(ValueError, match=sentence), serving(server, [option], tmp_path / "log"):
            pass
