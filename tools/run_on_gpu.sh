#!/usr/bin/env bash
# Everything that needs a GPU, in one run: the checks first, then the benchmarks.
#
#   tools/run_on_gpu.sh FOLDER [SECONDS]     results and logs go into FOLDER
#
# SECONDS, 1,500 unless given, is for all of it: each part has a share, and a part that
# reaches its limit or fails does not stop the next. The checks need torch, Triton and
# pytest, jax_step.py JAX for CUDA, the cases of packages Accelerate and transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: tools/run_on_gpu.sh FOLDER [SECONDS]}")
seconds=${2:-1500}
mkdir -p "$folder"
export PYTHONPATH=src:tests PYTHONUNBUFFERED=1
failed=0

# part NAME PERCENT COMMAND...: runs a command for at most its share of the time.
part() {
  local name=$1 limit=$((seconds * $2 / 100))
  shift 2
  local start=$SECONDS
  timeout "$limit" "$@" > "$folder/$name.log" 2>&1
  local status=$?
  echo "$name: exit status $status after $((SECONDS - start)) s of $limit"
  tail -n 3 "$folder/$name.log" | sed 's/^/    /'
  [ "$status" -eq 0 ] || failed=1
}

part kernels 6 python tests/kernels/gpu_cases.py cuda
part optimizers 8 python tests/kernels/optim_cases.py cuda
part captured_step 3 python examples/recipes/captured_step.py
part scaler 5 python -m pytest -q tests/adapters/torch/test_cuda.py
part ranks 3 python tests/distributed/gpu_cases.py
part packages 4 python tests/ecosystem/gpu_cases.py
part host_time 10 python benchmarks/torch_host_time.py cuda "$folder"
part optim 28 python benchmarks/torch_optim.py cuda "$folder/torch_optim.cuda.csv" \
  $((seconds * 27 / 100))
part recording 6 python benchmarks/recording_step.py cuda "$folder/recording_step.cuda.csv"
part torch_step 8 python benchmarks/torch_step.py cuda "$folder"
part quality 11 python benchmarks/torch_quality.py cuda "$folder/torch_quality.cuda.csv" \
  $((seconds * 10 / 100))
part jax 8 python benchmarks/jax_step.py cuda "$folder"
exit "$failed"
