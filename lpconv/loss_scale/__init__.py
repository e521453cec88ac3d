"""Global loss scales: one factor on the loss that keeps small gradients from underflowing in a 16-bit format."""

from lpconv.loss_scale.scales import LOSS_SCALES, Floor, LossScale, largest_gradient, make_loss_scale, unscale_

__all__ = ["LOSS_SCALES", "Floor", "LossScale", "largest_gradient", "make_loss_scale", "unscale_"]
