# Judges a checkpoint that another tool quantised, compares it with its original, and decodes it to plain fp32.
set -e
lpconv inspect "${1:-quantised}" --strict
lpconv verify "${1:-quantised}" --against "${2:-original}"
lpconv restore "${1:-quantised}" --dtype fp32 -o decoded
