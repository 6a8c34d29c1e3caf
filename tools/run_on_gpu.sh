#!/usr/bin/env bash
# Everything that needs a GPU, in one run: the checks first, then the benchmarks.
#
#   tools/run_on_gpu.sh FOLDER [SECONDS [PART...]]     results and logs go into FOLDER
#
# SECONDS, 1,500 unless given, is for all of it: each part has a share, and a part that
# reaches its limit or fails does not stop the next. PART names the parts to run, all
# unless given. The checks run at the same time, the benchmarks one after the other. The
# checks need torch, Triton and pytest, jax_step.py JAX for CUDA, the cases of packages
# Accelerate and transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: tools/run_on_gpu.sh FOLDER [SECONDS [PART...]]}")
seconds=${2:-1500}
chosen=" ${*:3} "
mkdir -p "$folder"
export PYTHONPATH=src:tests PYTHONUNBUFFERED=1
failed=0

# part NAME PERCENT COMMAND...: runs a command for at most its share of the time.
part() {
  local name=$1 limit=$((seconds * $2 / 100))
  shift 2
  [[ $chosen == "  " || $chosen == *" $name "* ]] || return 0
  local start=$SECONDS
  timeout "$limit" "$@" > "$folder/$name.log" 2>&1
  local status=$?
  echo "$name: exit status $status after $((SECONDS - start)) s of $limit"
  tail -n 3 "$folder/$name.log" | sed 's/^/    /'
  return "$status"
}

checks=()
# check NAME PERCENT COMMAND...: the same, at the same time as the other checks.
check() {
  part "$@" &
  checks+=($!)
}

check kernels 30 python tests/kernels/gpu_cases.py cuda
check optimizers 30 python tests/kernels/optim_cases.py cuda
check norms 30 python tests/kernels/norm_cases.py cuda
check captured_step 30 python examples/recipes/captured_step.py
check policies 30 python tests/kernels/policy_cases.py cuda
check statistics 30 python tests/kernels/statistics_cases.py cuda
check faults 30 python tools/run_faults.py torch --device cuda --steps 4000 --jobs 6
check scaler 30 python -m pytest -q --noconftest tests/adapters/torch/test_cuda.py
check ranks 30 python tests/distributed/gpu_cases.py
check packages 30 python tests/ecosystem/gpu_cases.py
for process in "${checks[@]}"; do
  wait "$process" || failed=1
done

part host_time 10 python benchmarks/torch_host_time.py cuda "$folder" || failed=1
part optim 16 python benchmarks/torch_optim.py cuda "$folder/torch_optim.cuda.csv" \
  $((seconds * 12 / 100)) || failed=1
part recording 8 python benchmarks/recording_step.py cuda \
  "$folder/recording_step.cuda.csv" || failed=1
part torch_step 8 python benchmarks/torch_step.py cuda "$folder" || failed=1
part quality 16 python benchmarks/torch_quality.py cuda \
  "$folder/torch_quality.cuda.csv" $((seconds * 14 / 100)) || failed=1
part jax 12 python benchmarks/jax_step.py cuda "$folder" || failed=1
exit "$failed"
