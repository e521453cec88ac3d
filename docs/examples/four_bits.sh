# Converts a model to 4 bits, rounded to nearest and calibrated on its own text; prints how far the outputs of each moved.
set -e
lpconv convert "${1:-demo}" --scheme W4A16 -o model-nearest
lpconv convert "${1:-demo}" --scheme W4A16 --rounding gptaq --calibrate self -o model-calibrated
