# Times a forward pass in fp32 and bf16 on this machine; prints medians, spread, memory and the error of the outputs.
set -e
lpconv bench "${1:-demo}" --format fp32,bf16 --compile off --seq-len 32 --min-time 0.1 --launches 1
