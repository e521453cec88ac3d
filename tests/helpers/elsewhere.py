"""Run scripts, and open checkpoints, in processes that have imported torch and transformers but not lpconv.

They are forked from one process, because importing both takes 3 to 5 seconds of processor time.
"""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Opened", "opens_elsewhere", "run_script"]

# Each line that it reads is a script, its arguments and the files for what it prints; it answers with the exit status.
_SERVER = """
import json
import os
import sys
import traceback
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
for line in sys.stdin:
    script, arguments, *files = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.argv = ["-c", *arguments]
    status = 1
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that has not imported lpconv."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    words = [str(a) for a in arguments]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server.stdin.write(json.dumps([script, words, out.name, err.name]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, status, out.read().decode(), err.read().decode())


_OPEN = """
import sys
sys.modules["lpconv"] = None
import torch
import transformers
name, dtype, decodes, out, *paths = sys.argv[1:]
asked = {"dtype": getattr(torch, dtype)} if dtype else {}
if decodes:
    asked["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
opened = []
for path in paths:
    model, info = getattr(transformers, name).from_pretrained(path, output_loading_info=True, **asked)
    if transformers.__version__.startswith("5.17."):  # names the scales that later ones ignore
        info["unexpected_keys"] = {k for k in info["unexpected_keys"] if not k.endswith(".weight_global_scale")}
    assert not any(info.values()), info
    linear = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    stored = [getattr(m, "weight_packed", getattr(m, "weight", None)) for m in linear.values()]
    num_codes = sum(x.dtype in (torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32) for x in stored)
    with torch.no_grad():
        output = model(input_ids=torch.arange(3, 35).view(2, 16))[0]
    weights = {n: p.detach() for n, p in model.named_parameters()}
    opened.append((output, num_codes, weights | {f"{n}.weight": m.weight.detach() for n, m in linear.items()}))
torch.save(opened, out)
"""


class Opened(NamedTuple):
    """The output of a model, the number of its Linear weights that are codes, and the weights it computes with."""

    output: Tensor
    num_codes: int
    weights: dict[str, Tensor]


def opens_elsewhere(
    *paths: Path, cls: str = "AutoModelForCausalLM", dtype: str = "", decodes: bool = False
) -> list[Opened]:
    """Open checkpoints with transformers alone; no key may be missing or unexpected."""
    out = paths[0].with_suffix(".pt")
    done = run_script(_OPEN, cls, dtype, "yes" if decodes else "", out, *paths)
    assert done.returncode == 0, done.stderr
    return [Opened(*opened) for opened in torch.load(out)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # it ends with its input
    return server
