"""What a number format would do to a model: exponent histograms of every layer's tensors, forward and backward."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.probe.advice import (
        answer as answer,
        assess as assess,
        own_scale as own_scale,
        recommend_loss_scale as recommend_loss_scale,
        sentence as sentence,
        table as table,
        what_if as what_if,
    )
    from lpconv.probe.checkpoint import (
        calibrate_checkpoint as calibrate_checkpoint,
        probe_checkpoint as probe_checkpoint,
    )
    from lpconv.probe.lca import LossChange as LossChange, by_layer as by_layer, summarise as summarise
    from lpconv.probe.noise import gradient_noise as gradient_noise
    from lpconv.probe.options import ProbeOptions as ProbeOptions
    from lpconv.probe.record import ProbedTensor as ProbedTensor, ProbeResult as ProbeResult, read_probe as read_probe
    from lpconv.probe.track import Tracker as Tracker, probe as probe, track as track

__all__ = lazily(__name__)
