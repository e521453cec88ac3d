# Runs two conversions in CI and publishes only what passes its gates; prints a table and ends with code 6 if one fails.
set -e
cat > gates.yaml <<'END'
version: 1
defaults: {model: demo, verify: logits}
jobs:
  - {id: fp8, format: e4m3fn, granularity: row, gates: ["sqnr>=25", "top1>=0.5"], output: model-fp8}
  - {id: bf16, format: bf16, gates: ["sqnr>=40"], output: model-bf16}
END
lpconv batch gates.yaml --keep-going --resume --junit results.xml
