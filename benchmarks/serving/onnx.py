"""Do other runtimes generate PyTorch's tokens from the file that `lpconv export onnx --cache` writes?

Creates virtual environments with ONNX Runtime, its generation library, OpenVINO and Optimum, exports the model in each
form, and compares greedy tokens and log-probabilities with those of PyTorch on the same weights in fp32. Neither side
may end a text. Existing results are extended.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import Rows, command, environment, machine, parser, work_folder
from benchmarks.serving.answers import PROMPTS, converted, greedy, prompts_of

# Optimum needs an older transformers and therefore its own environment.
ENVIRONMENTS = {
    "runtimes": ("onnxruntime", "onnxruntime-genai", "openvino", "numpy"),
    "optimum": ("torch==2.13.0", "optimum-onnx", "onnxruntime"),
}
RUNTIMES = {
    "onnxruntime": "runtimes", "openvino": "runtimes", "onnxruntime-genai": "runtimes", "optimum-onnx": "optimum",
}  # fmt: skip
FORMS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "e4m3fn, a scale per row": ("--format", "e4m3fn", "--granularity", "row"),
    "int4, groups of 32": ("--format", "int4", "--granularity", "group:32", "--layout", "compressed-tensors"),
}
NUM_TOKENS = 24
# Writes the logits of one run over PyTorch's tokens, and prints the runtime's own tokens.
CHILD = """
import importlib.metadata, json, sys
import numpy as np
folder, runtime, out, prompts, wanted, ends = *sys.argv[1:4], *map(json.loads, sys.argv[4:])
version = importlib.metadata.version(runtime)

def with_genai():
    import onnxruntime_genai as og
    model, tokens = og.Model(folder), []
    for prompt, whole in zip(prompts, wanted):
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(whole), min_length=len(whole))
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        tokens.append([int(i) for i in generator.get_sequence(0)])
    return tokens

def with_optimum():
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    model, tokens = ORTModelForCausalLM.from_pretrained(folder), []
    for prompt, whole in zip(prompts, wanted):
        ids = torch.tensor([prompt])
        options = {"min_new_tokens": len(whole) - len(prompt), "max_new_tokens": len(whole) - len(prompt)}
        mask = torch.ones_like(ids)
        tokens.append(model.generate(ids, attention_mask=mask, do_sample=False, **options)[0].tolist())
    return tokens

def runner():
    if runtime == "openvino":
        import openvino
        # Its default may be bf16, and with AVX-512 it rounds the inputs of products with int4 to 8 bits.
        options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        model = openvino.Core().compile_model(f"{folder}/model.onnx", "CPU", options)
        shapes = {i.get_any_name(): i.partial_shape for i in model.inputs}
        sizes = {n: (s[1].get_length(), s[3].get_length()) for n, s in shapes.items() if n.startswith("past")}
        return sizes, lambda feed: [result.copy() for result in model(feed).values()]
    import onnxruntime
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    sizes = {i.name: (i.shape[1], i.shape[3]) for i in session.get_inputs() if i.name.startswith("past")}
    return sizes, lambda feed: session.run(None, feed)

def with_loop():
    sizes, run = runner()
    def step(ids, length, past):
        positions = np.arange(length - len(ids), length)[None]
        return run({"input_ids": np.array([ids]), "attention_mask": np.ones((1, length), np.int64),
                    "position_ids": positions, **past})
    tokens = []
    for index, (prompt, whole) in enumerate(zip(prompts, wanted)):
        empty = {n: np.zeros((1, heads, 0, size), np.float32) for n, (heads, size) in sizes.items()}
        np.save(f"{out}/{index}.npy", step(whole, len(whole), empty)[0][0])
        past, now, ids = empty, prompt, list(prompt)
        while len(ids) < len(whole):
            logits, *present = step(now, len(ids), past)
            logits[..., ends] = -np.inf
            past, now = dict(zip(sizes, present)), [int(logits[0, -1].argmax())]
            ids += now
        tokens.append(ids)
    return tokens

tokens = {"onnxruntime-genai": with_genai, "optimum-onnx": with_optimum}.get(runtime, with_loop)()
print(json.dumps({"version": version, "tokens": tokens}))
"""


def export(model: str, arguments: tuple[str, ...], folder: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint in one form and the record of its export to ``FOLDER/onnx``, both created unless they exist."""
    source, output = converted(model, arguments, folder / "low") if arguments else Path(model), folder / "onnx"
    if not output.exists():
        # int4 differs by 1.7e-5 at one token of 43, where 30 layers amplify rounding errors.
        words = ["export", "onnx", source, "--cache", "--tolerance", "1e-4", "-q", "-o", output]
        subprocess.run([sys.executable, "-m", "lpconv", *words], check=True)
    (output / "genai_config.json").write_text(json.dumps(genai_config(output)))
    record: dict[str, Any] = json.loads((output / "lpconv.json").read_text())
    return source, record


def genai_config(folder: Path) -> dict[str, Any]:
    """The config that onnxruntime-genai needs for an exported decoder."""
    config = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    layer = {f"{kind}_{side}_names": f"{prefix}.%d.{side}" for kind, prefix in
             (("past", "past_key_values"), ("present", "present")) for side in ("key", "value")}  # fmt: skip
    decoder = {
        "filename": "model.onnx",
        "head_size": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        **{name: config[name] for name in names},
        "inputs": {n: n for n in ("input_ids", "attention_mask", "position_ids")}
        | {n: v for n, v in layer.items() if n.startswith("past")},
        "outputs": {"logits": "logits"} | {n: v for n, v in layer.items() if n.startswith("present")},
    }
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "pad_token_id": 0}
    size = {"context_length": config["max_position_embeddings"], "vocab_size": config["vocab_size"]}
    search = {"do_sample": False, "past_present_share_buffer": False, "max_length": config["max_position_embeddings"]}
    return {"model": {"type": config["model_type"], **ids, **size, "decoder": decoder}, "search": search}


def right_answers(source: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens with their prompts, and log-probabilities [tokens, vocabulary], from PyTorch."""
    import torch

    import lpconv

    model = lpconv.load(source, dtype=torch.float32)
    wanted = [p + t for p, t in zip(prompts, greedy(model, prompts, NUM_TOKENS), strict=True)]
    with torch.inference_mode():
        logs = [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in wanted]
    return wanted, logs


def compare(python: Path, runtime: str, folder: Path, prompts: list[list[int]], right: Any) -> dict[str, Any]:
    """Run one runtime on an export and compare it with PyTorch's answers."""
    import numpy as np
    import torch

    wanted, logs = right
    ends = [json.loads((folder / "onnx" / "config.json").read_text())["eos_token_id"]]
    arguments = [folder / "onnx", runtime, folder, *map(json.dumps, (prompts, wanted, ends))]
    done = subprocess.run([python, "-c", CHILD, *arguments], capture_output=True, text=True)
    if done.returncode:
        return {"runtime": runtime, "failed": done.stderr.strip().splitlines()[-1]}
    answers = json.loads(done.stdout.splitlines()[-1])
    equal = sum(a == b for p, x, y in zip(prompts, answers["tokens"], wanted, strict=True)
                for a, b in zip(x[len(p) :], y[len(p) :], strict=True))  # fmt: skip
    row = {"runtime": runtime, "version": answers["version"], "equal_tokens": equal, "of": NUM_TOKENS * len(prompts)}
    if runtime in ("onnxruntime-genai", "optimum-onnx"):
        return row
    read = [torch.from_numpy(np.load(folder / f"{i}.npy")).log_softmax(-1) for i in range(len(prompts))]
    gaps = torch.cat([(a - b).abs().flatten() for a, b in zip(read, logs, strict=True)])
    return {**row, "difference": {"mean": float(gaps.mean()), "largest": float(gaps.max())}}


def main() -> None:
    """Run every form in every runtime, and save the result."""
    arguments = parser(__doc__, work="keep the environment and the outputs in this folder")
    arguments.add_argument("model", help="a Llama-like decoder")
    arguments.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    arguments.add_argument("--runtimes", nargs="*", choices=RUNTIMES, default=list(RUNTIMES))
    given = arguments.parse_args()
    prompts, model = prompts_of(given.model), Path(given.model).name
    head = {"machine": machine("onnx", "onnxscript"), "prompts": PROMPTS}
    rows = Rows(given.out, ("model", "form", "runtime"), lambda: head)
    with work_folder(given.work) as work:
        places = {RUNTIMES[r] for r in given.runtimes}
        pythons = {name: environment(work / name, ENVIRONMENTS[name]) for name in places}
        for form in given.forms:
            folder = work / f"{model}-{list(FORMS).index(form)}"
            folder.mkdir(exist_ok=True)
            source, record = export(given.model, FORMS[form], folder)
            right = right_answers(source, prompts)
            facts = {
                "model": model,
                "form": form,
                "command": command().replace(given.model, "MODEL"),
                "opset": record["opset"],
                "size_bytes": sum(f["size_bytes"] for f in record["files"]),
                "stored": {w["form"]: w["num_tensors"] for w in record["weights"]},
                "check_max_rel_diff": record["check"]["max_rel_diff"],
            }
            for runtime in given.runtimes:
                rows.put({**facts, **compare(pythons[RUNTIMES[runtime]], runtime, folder, prompts, right)})


if __name__ == "__main__":
    main()
