"""Low-precision rewriting of Hugging Face checkpoints.

Importing this package loads neither torch nor transformers. The code is in sub-packages; see `docs/design`. A package
such as `lpconv.convert` can be called: ``lpconv.convert(...)`` is ``lpconv.convert.convert(...)``.
"""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily
from lpconv.version import __version__

if TYPE_CHECKING:
    from lpconv import optim as optim
    from lpconv.advise.run import advise as advise
    from lpconv.bench.run import bench as bench
    from lpconv.convert.restore import restore as restore
    from lpconv.convert.run import convert as convert
    from lpconv.inspect.headers import inspect as inspect
    from lpconv.models.load import load as load
    from lpconv.probe.track import probe as probe, track as track
    from lpconv.scaled.model import scaled as scaled
    from lpconv.train.run import finetune as finetune
    from lpconv.verify.run import verify as verify

__all__ = ["__version__", *lazily(__name__)]
