"""Tensors as `data · scale`: rules that propagate scales, and the training methods that build on them."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.scaled.adaptive import (
        AdaptiveOptions as AdaptiveOptions,
        adaptive_factor as adaptive_factor,
        adaptive_scaling as adaptive_scaling,
        loss_scales as loss_scales,
    )
    from lpconv.scaled.calibrate import (
        EdgeFactors as EdgeFactors,
        apply_factors as apply_factors,
        calibrate as calibrate,
    )
    from lpconv.scaled.choices import (
        OPERAND_SCALES as OPERAND_SCALES,
        OperandScales as OperandScales,
        operand_scales as operand_scales,
    )
    from lpconv.scaled.disk import (
        from_disk as from_disk,
        read_factors as read_factors,
        to_disk as to_disk,
        write_factors as write_factors,
    )
    from lpconv.scaled.guard import (
        StepGuard as StepGuard,
        check_gradients as check_gradients,
        gradients_are_finite as gradients_are_finite,
    )
    from lpconv.scaled.model import (
        fallbacks as fallbacks,
        native as native,
        saved_bytes as saved_bytes,
        scaled as scaled,
        scaling_of as scaling_of,
        unscaled_state_dict as unscaled_state_dict,
    )
    from lpconv.scaled.native import native_groups as native_groups
    from lpconv.scaled.optimizer import AdamW as AdamW, HyperParameters as HyperParameters, equivalent as equivalent
    from lpconv.scaled.places import dynamic_rescale as dynamic_rescale, dynamic_rescale_grad as dynamic_rescale_grad
    from lpconv.scaled.tensor import ScaledTensor as ScaledTensor, scaled_tensor as scaled_tensor

__all__ = lazily(__name__)
