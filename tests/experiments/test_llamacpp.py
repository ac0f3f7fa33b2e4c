"""`make engines` without the engine: what it compares it sees, and a server that does not start is told with its log."""

import stat
import sys
import urllib.request

import gguf
import numpy as np
import pytest
from dflash_hub.experiments.llamacpp import Pair, differences, judge
from dflash_hub.experiments.llamacpp_server import serving

FAKE = """#!{python}
import http.server, sys
print("starting", *sys.argv[1:], flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
if "--broken" in sys.argv:
    sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def record(method, number, rounds, same=True, gap=None, totals=None):
    place = {"method": method, "set": "s", "id": f"p{number}", "turn": 0}
    return place | {"rounds": rounds, "round_totals": totals, "same_text": same} | ({} if same else {"tie_gap": gap})


def judged(*served, file=None):
    """Ours makes ten rounds of three tokens in each text; `served` says how the server did."""
    records = [record("ours-4", number, [3] * 10) for number in range(len(served))]
    records += [record("served-2", number, [], **answer) for number, answer in enumerate(served)]
    return judge(Pair("row", "drafter", "target", file), records, "ours-4")


def test_texts_and_acceptance_are_judged():
    same, fewer = {"totals": [30, 10]}, {"totals": [30, 11]}
    rows, faults = judged(same, same)
    assert faults == [] and rows[-1] == ["row", "all", "2 texts", "same", "3.00", "3.00"]
    assert rows[0] == ["row", "s", "p0", "same", "3.00", "3.00"]
    _, faults = judged(fewer, fewer)
    assert faults == ["row: acceptance length 2.73 there, 3.00 here"]
    # A tie is told, and its rounds are not compared; another text is a fault.
    rows, faults = judged(same, {"same": False, "gap": 0.01, "totals": [10, 10]})
    assert faults == [] and rows[1][3] == "another, gap 0.0100" and rows[-1][2] == "1 texts"
    _, faults = judged(same, {"same": False, "gap": 0.1, "totals": [30, 10]})
    assert faults == ["row, s p1 0: another text, where the two best logits are 0.100 apart"]
    assert judged(same, {"same": False, "gap": 0.1, "totals": [30, 10]}, file="q4.gguf")[1] == []
    assert judged({"same": False, "gap": 0.01, "totals": [30, 10]})[1] == ["row: no text is the same"]


def written(path, block=8, value=1.0, name="a drafter", bos=None):
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_name(name)
    writer.add_uint32("dflash.block_size", block)
    if bos is not None:
        writer.add_add_bos_token(bos)
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
    with (
        pytest.raises(ValueError, match="is not ready; its log .*\n.*\nno such model"),
        serving(server, ["--broken"], tmp_path / "log"),
    ):
        pass
