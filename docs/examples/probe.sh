# Runs two training steps; prints, layer by layer, what fp8 and 16-bit formats would lose.
set -e
lpconv probe "${1:-demo}" --steps 2 --batch-size 2 --seq-len 64
