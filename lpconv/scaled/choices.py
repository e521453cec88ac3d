"""Options of the scaled methods: operand scales and learning-rate rules. Plain records, without torch."""

from dataclasses import dataclass

from lpconv.lookup import find

OPERAND_SCALES = {
    "static": "no scale from data: operands are cast directly, or at calibrated scales, and large values saturate",
    "l2": "a power of two per tensor, from its RMS; outliers saturate",
    "max": "a power of two per tensor, from its largest magnitude",
    "tensor": "one scale per tensor, from its largest magnitude",
    "row": "one scale per row of the left operand and per column of the right one, from largest magnitudes",
    "mx": "a power of two per 32 elements along the summed axis (OCP Microscaling); attention stays in 16 bits",
    "carrier": "no cast: the product stays in 16 bits",
}
FP4_SCALES = {
    "nvfp4": "an e4m3fn scale per 16 elements along the summed axis, and one per tensor; attention stays in 16 bits",
    "nvfp4-static": "nvfp4 without the tensor's scale, for unit-scaled models",
    **{kind: OPERAND_SCALES[kind] for kind in ("mx", "row", "static", "carrier")},
}
USUAL_OPERAND_SCALE = "row"  # smallest weight error of a fine-tuned SmolLM2, and no clipping
# Config entry of models drawn by native unit scaling: the seed, and the norm with the head's factor.
NATIVE_MARK = "lpconv_native"
LEARNING_RATES = {
    "unit": "one learning rate for all unit-scale parameters (Blake et al. 2023)",
    "u-mup": "divided by √K for matrices, and by the square root of the width for embeddings (Blake et al. 2024, u-μP)",
}
PRODUCTS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True, kw_only=True)
class OperandScales:
    """The kind of operand scale for each of the three products of a linear layer.

    A kind is a name of `OPERAND_SCALES`, or of `FP4_SCALES` for fp4.
    The products of eager attention count as outputs, and those of its backward pass as input gradients.
    """

    output: str = USUAL_OPERAND_SCALE
    grad_input: str = USUAL_OPERAND_SCALE
    grad_weight: str = USUAL_OPERAND_SCALE

    def __post_init__(self) -> None:
        for name in self.kinds:
            find("operand scale", name, OPERAND_SCALES | FP4_SCALES)

    def check(self, precision: str) -> None:
        """Raise `UsageError` if a product of that precision, fp8 or fp4, has no such scale."""
        for name in self.kinds:
            find(f"operand scale of {precision}", name, FP4_SCALES if precision == "fp4" else OPERAND_SCALES)

    @property
    def kinds(self) -> tuple[str, str, str]:
        """The kinds in the order of `PRODUCTS`."""
        return self.output, self.grad_input, self.grad_weight

    def __str__(self) -> str:
        """The text that `operand_scales` parses."""
        if len(set(self.kinds)) == 1:
            return self.output
        return ",".join(f"{product}={kind}" for product, kind in zip(PRODUCTS, self.kinds, strict=True))


def operand_scales(text: str) -> OperandScales:
    """Parse one name for all products, such as ``row``, or names by product, such as ``row,grad_weight=carrier``.

    A product that is not named gets the name without a product, or else the default. Raises `UsageError` for unknown
    names.
    """
    parts = [part.rpartition("=") for part in text.replace(" ", "").split(",")]
    alone = {product: kind for _, given, kind in parts if not given for product in PRODUCTS}
    named = {product.replace("-", "_"): kind for product, given, kind in parts if given}
    for product in named:
        find("product", product, dict.fromkeys(PRODUCTS))
    return OperandScales(**(alone | named))
