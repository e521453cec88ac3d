"""Convert with codes that were found elsewhere: the output stores them, and is verified as after error feedback."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from lpconv.errors import InputError
from lpconv.forms import Form
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.facts import Measurement
from lpconv.forms.form import Side
from lpconv.forms.rounded import Rounded, bytes_on_grid, digest_of
from lpconv.forms.scaled import ScaledCodes
from lpconv.models.coded import Codes
from lpconv.plan.job import Job
from lpconv.plan.plan import PlannedTensor
from lpconv.results import RoundingRecord
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.source import Source, read_tensor


def with_codes(job: Job, codes: Mapping[str, Side]) -> Job:
    """The job with forms that store `codes`, the components of tensors by name; other tensors are rounded as planned.

    Raises InputError for a tensor that the plan stores otherwise.
    """
    forms = {t.name: _given(job.source, t, codes[t.name]) for t in job.plan.tensors if t.name in codes}
    return dataclasses.replace(job, plan=job.plan.with_forms(lambda t: forms.get(t.name, t.form)))


def stored_parts(form: ScaledCodes, values: Tensor, side: Side, work: Workspace) -> dict[str, Tensor]:
    """The components to store, by name, for numbers on the form's grid (fp32, 1-D) with the scales in `side`."""
    (component,) = form.data
    raw = bytes_on_grid(form, values, 0, Measurement(stats=block_stats(values, work), side=side), work)
    codes = raw.view(TORCH_DTYPES.get(component.dtype, torch.uint8)).view(component.shape)
    return {**side, component.name: codes}


def _given(source: Source, t: PlannedTensor, parts: Side) -> Form:
    form, codes = t.form, Codes.from_form(t.form, parts)
    if not isinstance(form, ScaledCodes) or parts.keys() != {c.name for c in form.components}:
        raise InputError(
            f"the codes of `{t.name}` are not stored as {form.words}", hint="convert the source again with this lpconv"
        )
    held = {c.name: parts[c.name] for c in form.side}
    weight, got = read_tensor(source, t.name).float().view(-1), torch.empty(form.num_elements)
    distance = codes.decode_to(got).sub_(weight).abs_().div_(form.scale_of_each(held, 0, form.num_elements))
    record = RoundingRecord(max_steps=float(distance.amax()), sha256=digest_of(parts))
    return Rounded.around(form, codes.fetch, held, record)
