"""`python -c SCRIPT`, forked from one process that has imported torch and transformers, and never lpconv.

Starting Python anew takes 3 to 5 seconds of processor time, nearly all of it for these two.
"""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_script"]

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
    """What a script printed and how it ended, in a process that has imported nothing of ours."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    words = [str(a) for a in arguments]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server.stdin.write(json.dumps([script, words, out.name, err.name]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, status, out.read().decode(), err.read().decode())


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # it ends with its input
    return server
