"""Fast kernels, each tested against a slow reference implementation."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.kernels.decode import decode as decode
    from lpconv.kernels.histogram import exponent_histogram as exponent_histogram
    from lpconv.kernels.linear import (
        FP4_RECIPES as FP4_RECIPES,
        FP8_RECIPES as FP8_RECIPES,
        LinearRecipe as LinearRecipe,
        calibrate as calibrate,
        fp8_recipe as fp8_recipe,
        linear as linear,
        use_recipe as use_recipe,
    )
    from lpconv.kernels.matmul import HalfProducts as HalfProducts, matmul as matmul
    from lpconv.kernels.operands import Coded as Coded, OperandCast as OperandCast, encode_operand as encode_operand
    from lpconv.kernels.quantise import encode as encode, fake_quantise as fake_quantise

__all__ = lazily(__name__)
