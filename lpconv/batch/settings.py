"""The settings of each kind of job, as its command has them: name, how it is read, what it means."""

from lpconv.batch.fields import (
    AMOUNT,
    COUNT,
    COUNTS,
    FLAG,
    NUMBER,
    SCALE,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Field,
    field,
    gates,
    one_of,
    rules,
    some_of,
)
from lpconv.bench.cases import BASELINES, BENCH_FORMATS, BENCH_METHODS, BENCH_OPTIMIZERS, COMPILE_MODES, MODES, PARALLEL
from lpconv.convert.options import GRANULARITIES, LAYOUTS, VERIFY_LEVELS
from lpconv.gates import BENCH_GATES, CONVERT_GATES, FINETUNE_GATES
from lpconv.methods import METHODS
from lpconv.train.options import SAVES, SCHEDULES, TASKS, TWINS
from lpconv.train.recipes import PRECISIONS, RECIPES, TRAINING_METHODS, TRAINING_OPTIMIZERS

__all__ = ["BENCH_FIELDS", "CONVERT_FIELDS", "FINETUNE_FIELDS", "PROBE_FIELDS"]

_FORMATS = dict.fromkeys(f for m in METHODS.values() for f in m.formats)
_RESIDUALS = dict.fromkeys(r for m in METHODS.values() for r in (*m.residuals, *(["fp16"] if m.residuals else [])))

CONVERT_FIELDS: dict[str, Field] = {
    "method": field(one_of("method", METHODS), "how the weights are rewritten"),
    "format": field(one_of("format", _FORMATS), "the number format on disk; null is the method's own", nullable=True),
    "residual": field(one_of("residual", _RESIDUALS), "collage: the form of the residual", nullable=True),
    "layout": field(one_of("layout", LAYOUTS), "lpconv's own, or one that another package opens"),
    "scale": field(one_of("scale", ("pow2", "exact")), "scales as powers of two, or as they come"),
    "granularity": field(one_of("granularity", GRANULARITIES), "what has a scale of its own"),
    "budget_bits": field(NUMBER, "multipoint: stored bits per element", nullable=True),
    "points_max": field(COUNT, "multipoint: most points of a row", nullable=True),
    "include": field(TEXTS, "only tensors whose name matches one of these patterns are converted"),
    "exclude": field(TEXTS, "tensors whose name matches one of these patterns are kept"),
    "rules": field(rules(_FORMATS), "formats of single tensors, by pattern"),
    "revision": field(TEXT, "branch, tag or commit hash of a hub model", nullable=True),
    "max_memory": field(SIZE, "bound of the buffers", nullable=True),
    "workers": field(COUNT, "threads", nullable=True),
    "max_shard_size": field(SIZE, "largest output file; null is as the source's", nullable=True),
    "verify": field(one_of("verification level", VERIFY_LEVELS), "how deep the output is verified"),
    "gates": field(gates(CONVERT_GATES), "conditions on the verification that must hold, such as sqnr>=25"),
    "force": field(FLAG, "replace an output that is there"),
    "trust_remote_code": field(FLAG, "let the checkpoint's own code run when it is verified"),
}

FINETUNE_FIELDS: dict[str, Field] = {
    "recipe": field(one_of("recipe", RECIPES), "a named arithmetic; the next six replace its parts", nullable=True),
    "precision": field(one_of("precision", PRECISIONS), "what products are computed in", nullable=True),
    "method": field(one_of("method", TRAINING_METHODS), "how tensors are scaled", nullable=True),
    "optimizer": field(one_of("optimizer", TRAINING_OPTIMIZERS), "what AdamW keeps between steps", nullable=True),
    "rounding": field(one_of("rounding", ("nearest", "stochastic")), "how bf16 weights are written", nullable=True),
    "loss_scale": field(SCALE, "none, dynamic, logmax, adaptive or a number", nullable=True),
    "loss_scale_floor": field(TEXT, "the smallest loss scale from each step on: 0:1,40000:8192", nullable=True),
    "task": field(one_of("task", TASKS), "what the model is trained to do"),
    "data": field(TEXT, "a file or a data set on the hub; null is plays in lpconv", nullable=True, is_path=True),
    "eval_data": field(TEXT, "held-out data; null splits a tenth off", nullable=True, is_path=True),
    "text_column": field(TEXT, "the column of texts", nullable=True),
    "label_column": field(TEXT, "the column of classes or targets", nullable=True),
    "seq_len": field(COUNT, "tokens in a sequence", nullable=True),
    "steps": field(COUNT, "optimizer steps"),
    "batch_size": field(COUNT, "sequences in a step"),
    "lr": field(NUMBER, "the highest learning rate"),
    "schedule": field(one_of("schedule", SCHEDULES), "how the learning rate falls"),
    "warmup": field(AMOUNT, "share of the steps in which it rises"),
    "weight_decay": field(AMOUNT, "decoupled weight decay"),
    "beta2": field(AMOUNT, "decay of the second moment"),
    "clip": field(AMOUNT, "largest gradient norm; 0 for any"),
    "seed": field(WHOLE, "the first seed"),
    "seeds": field(COUNT, "how many seeds, for the noise"),
    "twin": field(one_of("twin", TWINS), "what the run is compared with"),
    "eval_every": field(WHOLE, "steps between evaluations", nullable=True),
    "eval_batches": field(COUNT, "batches of an evaluation, at most"),
    "save_every": field(WHOLE, "steps between checkpoints", nullable=True),
    "track_every": field(WHOLE, "steps between records of underflow", nullable=True),
    "lca": field(FLAG, "allot the loss change to layers"),
    "calibrate": field(FLAG, "measure unit scaling's static scales on the first batches"),
    "critical": field(TEXTS, "modules that keep 16-bit products in scaled fp8"),
    "save": field(one_of("form to save", SAVES), "the form of the trained model"),
    "log_to": field(TEXTS, "tensorboard, wandb, trackio …"),
    "compile": field(FLAG, "train through torch.compile"),
    "max_memory": field(SIZE, "refuse what is estimated to need more", nullable=True),
    "revision": field(TEXT, "branch, tag or commit hash of a hub model", nullable=True),
    "gates": field(gates(FINETUNE_GATES), "conditions that must hold, such as loss_gap<=0.05"),
    "force": field(FLAG, "replace an output that is there"),
}

BENCH_FIELDS: dict[str, Field] = {
    "format": field(some_of("format", BENCH_FORMATS), "the formats that are measured"),
    "method": field(some_of("method", BENCH_METHODS), "how fp8 and fp16 are run"),
    "mode": field(some_of("mode", MODES), "infer, train, or both"),
    "optimizer": field(some_of("optimizer", BENCH_OPTIMIZERS), "for mode train"),
    "layers": field(COUNT, "only so many of the model's layers", nullable=True),
    "batch": field(COUNTS, "sequences in a step"),
    "seq": field(COUNTS, "tokens in a sequence"),
    "baseline": field(one_of("baseline", BASELINES), "what the rest is compared with"),
    "compile": field(one_of("compile mode", COMPILE_MODES), "what torch.compile gets"),
    "device": field(TEXT, "cpu, cuda or cuda:N; null is a GPU if there is one", nullable=True),
    "processes": field(COUNT, "how many work together"),
    "parallel": field(one_of("kind of parallelism", PARALLEL), "how they do", nullable=True),
    "threads": field(COUNT, "CPU threads of each process", nullable=True),
    "min_iters": field(COUNT, "at least so many timed steps of each"),
    "min_time": field(AMOUNT, "at least so many seconds of each"),
    "rounds": field(COUNT, "turns that baseline and variant take"),
    "launches": field(COUNT, "new processes for each, over which these are spread"),
    "seed": field(WHOLE, "for weights and token ids"),
    "compare": field(TEXT, "an older result: fail on regressions", nullable=True, is_path=True),
    "gates": field(gates(BENCH_GATES), "conditions on every row, such as speedup>=1.2"),
    "force": field(FLAG, "replace a result that is there"),
}

PROBE_FIELDS: dict[str, Field] = {
    "data": field(TEXT, "a text file; null is plays in lpconv", nullable=True, is_path=True),
    "steps": field(COUNT, "forward and backward passes"),
    "batch_size": field(COUNT, "sequences in a batch"),
    "seq_len": field(COUNT, "tokens in a sequence", nullable=True),
    "every": field(COUNT, "record every so many steps"),
    "calibrate": field(FLAG, "also write the scales that unit scaling should use"),
    "seed": field(WHOLE, "for masks and random ids"),
    "revision": field(TEXT, "branch, tag or commit hash of a hub model", nullable=True),
    "force": field(FLAG, "replace an output that is there"),
}
