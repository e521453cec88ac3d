"""Loss scales by name."""

import inspect
from typing import Any

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.loss_scale.base import LossScale
from lpconv.loss_scale.constant import ConstantLossScale, NoLossScale
from lpconv.loss_scale.dynamic import DynamicLossScale
from lpconv.loss_scale.logmax import LogMaxLossScale

LOSS_SCALES: dict[str, type[LossScale]] = {
    kind.name: kind for kind in (NoLossScale, ConstantLossScale, DynamicLossScale, LogMaxLossScale)
}


def make_loss_scale(name: str, **options: Any) -> LossScale:
    """The loss scale of that name, none, constant, dynamic or logmax; the options are those of its class.

    Raises `UsageError` for unknown names, unknown or missing options, and values out of range. (Adaptive scaling works
    layer by layer, inside the model: `lpconv.scaled.adaptive_scaling(model)`.)
    """
    kind = find("loss scale", name, LOSS_SCALES)
    parameters = inspect.signature(kind).parameters
    for option in options:
        find(f"option of the loss scale {name}:", option, parameters)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UsageError(f"the loss scale {name} needs a value for {', '.join(missing)}", hint=f"{missing[0]}=1024")
    return kind(**options)
