"""Plant faults in the source of lpconv, one at a time, and list the tests that catch each.

    python -m tests.faults.planted                           # half an hour
    python -m tests.faults.planted --only ties_up lost_weight   # some of them

Each fault replaces one piece of text that occurs exactly once in lpconv, wherever it has been moved to, in a copy of
the working tree. Then the tests that should catch it run there, until `MOST` have failed. A fault that no test
catches, or whose text is no longer found, is an error of this list or of the tests: the exit code is 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 3  # tests that may fail before a run is stopped


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`right` becomes `wrong`; `tests` are the files or folders that should notice."""

    right: str
    wrong: str
    tests: tuple[str, ...]


def _fault(right: str, wrong: str, *tests: str) -> Fault:
    return Fault(right=right, wrong=wrong, tests=tuple(f"tests/{t}" for t in tests))


FAULTS: dict[str, Fault] = {
    # Numbers: rounding, clamps, special values.
    "ties_up": _fault("steps.round_().mul_(step)", "(steps + 0.5).floor_().mul_(step)", "formats"),
    "no_saturation": _fault("saturated = rounded.clamp(-limit, limit)", "saturated = rounded", "formats"),
    "biased_stochastic": _fault("draw < (steps - whole).abs()", "draw < 0.5", "formats"),
    "scale_rounds_down": _fault("1.0 + sys.float_info.epsilon)", "1.25)", "formats/test_scale.py"),
    "nan_keeps_sign": _fault("raw.masked_fill_(raw == 0xFF, 0x7F)", "pass", "kernels/test_quantise.py"),
    # Sums of several numbers.
    "lost_error_term": _fault("(a - (s - b_part)) + (b - b_part)", "b - b_part", "mcf"),
    "lost_point": _fault("values[rows] += _scaled_numbers", "values[rows] = _scaled_numbers", "mcf/test_multipoint.py"),
    "lost_compensation": _fault("nearest(compensation.float() + (value - old))", "nearest(value - old)", "optim"),
    "lost_sign_of_zero": _fault("torch.copysign(part, total, out=out)", "out.copy_(part)", "mcf/test_split.py"),
    # Layouts: axes, packing, zero points.
    "swapped_tile": _fault("height, _ = self.grain.sizes(", "_, height = self.grain.sizes(",
                           "convert/test_granularity.py"),
    "overlapping_codes": _fault("words.add_(words >> bits * count", "words.add_(words >> count",
                                "forms/test_foreign.py"),
    "awq_in_order": _fault("(0, 4, 1, 5, 2, 6, 3, 7)", "(0, 1, 2, 3, 4, 5, 6, 7)", "forms/test_foreign.py"),
    "gptq_zero_point": _fault("plus=int(is_first_version)", "plus=0", "forms/test_foreign.py"),
    # Reading a checkpoint.
    "hole_in_file": _fault("if t.begin != position:", "if t.begin < position:", "storage/test_header.py"),
    "file_cut_short": _fault("if data_start + position != file_size:", "if data_start + position < file_size:",
                             "storage/test_header.py"),
    "lost_weight": _fault("named.items() if _equal_bytes(source, n, keep)}", "named.items()}",
                          "convert/test_odd_tensors.py"),
    "offset_ignored": _fault("header.data_start + entry.info.begin + start,", "header.data_start + entry.info.begin,",
                             "convert/test_convert.py", "convert/test_parts.py"),
    # Writing, resuming, verifying.
    "vectors_as_codes": _fault("if len(info.shape) < 2:", "if len(info.shape) < 1:", "convert/test_convert.py"),
    "skipped_hash": _fault(' or sha256_of(path) != f["sha256"]', "", "storage/test_staging.py",
                           "faults/test_interrupted.py"),
    "torn_journal": _fault("os.ftruncate(self._journal.fileno(), size)", "pass", "storage/test_staging.py"),
    "force_deletes_all": _fault("if not _is_ours(output, marker):", "if False:", "storage/test_staging.py"),
    "damaged_is_finished": _fault("damaged = check_hashes(job.output, progress).mismatched", "damaged = ()",
                                  "convert/test_changing_source.py"),
    "stray_tensor": _fault("problems = (*stray, *untied,", "problems = (*untied,", "convert/test_verification.py"),
    "unmeasured_gate": _fault("passed = value is not None and _OPERATORS", "passed = value is None or _OPERATORS",
                              "test_gates.py"),
    "gate_published": _fault("not result.problems and all(g.passed for g in met)", "not result.problems",
                             "convert/test_bad_request.py", "storage/test_remote_output.py"),
    "reversed_kl": _fault("kl=float(_divergence(log_p, log_q)", "kl=float(_divergence(log_q, log_p)",
                          "verify/test_text.py"),
    "nan_in_weights": _fault("lost = int((known != torch.isfinite(y)).sum())", "lost = 0",
                             "faults/test_layout_damage.py"),
    # Scaled training.
    "norm_epsilon": _fault("data, eps / scale**2, scale", "data, eps / scale, scale", "scaled/test_rules.py"),
    "swapped_gradients": _fault("(ratio(scale_gv, inputs.query_scale), ratio(scale_gv, inputs.key_scale),",
                                "(ratio(scale_gv, inputs.key_scale), ratio(scale_gv, inputs.query_scale),",
                                "scaled/test_rules.py", "scaled/test_conformance.py"),
    "lost_factor": _fault("alpha=1 / r), multiply(scale, r))", "alpha=1 / r), scale)", "scaled/test_rules.py"),
    "sum_not_mean": _fault("self._own / self._common / dist.get_world_size()", "self._own / self._common",
                           "train/test_processes.py"),
    "smallest_scale": _fault("op=dist.ReduceOp.MAX, async_op", "op=dist.ReduceOp.MIN, async_op",
                             "train/test_processes.py"),
    "grows_on_overflow": _fault("0 if found_nonfinite else self._num_finite_in_a_row + 1",
                                "self._num_finite_in_a_row + 1", "loss_scale"),
    "trained_on_padding": _fault("(labels, seq_len), IGNORED)", "(labels, seq_len), self.pad_id)",
                                 "train/test_tasks.py", "train/test_data.py", "train/test_finetune.py"),
    "seed_ignored": _fault("generator = np.random.default_rng(seed)", "generator = np.random.default_rng(0)",
                           "train/test_data.py"),
    # Measuring, batches, export.
    "not_simpson": _fault("+ 4 * self.middles)", "+ 2 * self.middles)", "probe/test_lca.py"),
    "not_interleaved": _fault("subjects if i % 2 == 0 else reversed(subjects)", "subjects", "bench/test_interleave.py"),
    "narrow_interval": _fault("error = deviation / count**0.5", "error = deviation / count",
                              "test_student.py", "bench/test_intervals.py"),
    "keeps_the_noisier": _fault("row.noise <= than.noise * _SAME_NOISE", "row.noise >= than.noise / _SAME_NOISE",
                                "advise/test_choice.py"),
    "unlocked_source": _fault("return sha256_of(path) != record.sha256", "return False", "batch/test_batch_run.py"),
    "needs_ignored": _fault("return not any(other.id in job.needs and", "return True or any(other.id in job.needs and",
                            "batch/test_batch_placed.py"),
    "lost_residual": _fault("for component in weight.components[1:]:", "for component in weight.components[1:1]:",
                            "export/test_onnx.py"),
}  # fmt: skip


def place_of(fault: Fault, tree: Path) -> Path:
    """The file with the text that a fault replaces. Raises LookupError unless it occurs once."""
    sources = {p: p.read_text(encoding="utf-8") for p in sorted((tree / "lpconv").rglob("*.py"))}
    holders = [p for p, text in sources.items() for _ in range(text.count(fault.right))]
    if len(holders) != 1:
        raise LookupError(f"`{fault.right}` occurs in {[str(p.relative_to(tree)) for p in holders]}, not once")
    return holders[0]


def catching(tests: tuple[str, ...], tree: Path) -> list[str]:
    """The tests that fail in a copy of the tree. No bytecode is cached: it could be stale."""
    command = [sys.executable, "-B", "-m", "pytest", *tests, "-q", "-n", "0", "-p", "no:cacheprovider",
               f"--maxfail={MOST}", "--tb=no", "-rfE"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode not in (0, 1) or not all("::" in test for test in failed):  # tests that do not even start
        raise RuntimeError(f"pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    asked = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("lpconv", "tests", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree)
        for name in asked.only:
            fault = FAULTS[name]
            path = place_of(fault, tree)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
            caught_by = catching(fault.tests, tree)
            path.write_text(text, encoding="utf-8")
            print(name, path.relative_to(tree), *caught_by, sep="\n    ", flush=True)
            missed += [] if caught_by else [name]
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
