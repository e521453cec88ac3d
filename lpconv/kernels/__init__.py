"""Fast kernels, each tested against a slow reference implementation."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.kernels.decode import decode as decode
    from lpconv.kernels.fp8_linear import (
        FP8_RECIPES as FP8_RECIPES,
        Fp8Linear as Fp8Linear,
        convert_linears as convert_linears,
    )
    from lpconv.kernels.histogram import exponent_histogram as exponent_histogram
    from lpconv.kernels.linear import linear as linear
    from lpconv.kernels.matmul import HalfProducts as HalfProducts, matmul as matmul
    from lpconv.kernels.quantise import encode as encode, fake_quantise as fake_quantise

__all__ = lazily(__name__)
