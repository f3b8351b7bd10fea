#!/bin/sh
# What is measured on an H200 beside the server (serve_h200.sh) and training (train_smollm2.sh), a part at a time.
# Each part ends within ten minutes. Records go to $OUTPUT, benchmarks/h200 by default. From the repository's root:
#
#   benchmarks/h200.sh attention            kernels: their tests, beside their floors, the write into pages
#   benchmarks/h200.sh steps                whole steps with and without kernels
#   benchmarks/h200.sh soak [SECONDS]       random shapes, 570 seconds by default; no figures of speed
#   benchmarks/h200.sh goldens              the reference's outputs, on the device
#   benchmarks/h200.sh engine TEMPERATURE   the engine under load, with the device's idle time; 0 or 1
#   benchmarks/h200.sh drafter FOLDER [NAME=PATH …]   calibration of the shipped drafter, then the data sets in
#                                           FOLDER with it and with others
set -u
output=${OUTPUT:-benchmarks/h200}
part=${1:?name a part}
shift
mkdir -p "$output"

# The tests' own settings take the CPU where nothing is said; without the flag XLA tunes every product for minutes.
# Tests mostly compile, and share the GPU's memory.
untuned="XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"
gpu_tests="env JAX_PLATFORMS=cuda $untuned XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -p no:benchmark -n 8 -q"

run() { # seconds, command…
    limit=$1
    shift
    echo "── $*"
    timeout "$limit" "$@" || echo "── exit code $?"
}

attention() {
    run 240 $gpu_tests -m gpu tests/test_attention_gpu.py tests/test_mosaic.py -k "not goldens"
    run 240 python -m jspark bench kernels --output "$output/kernels.json"
    run 120 python benchmarks/kv_write.py "$output/kv_write.json"
}

steps() {
    XLA_PYTHON_CLIENT_MEM_FRACTION=.92 run 300 python benchmarks/step_attention.py "$output/step_attention.json" auto xla
}

soak() {
    seconds=${1:-570}
    # Every shape is compiled anew, and so is its reference in float32.
    run $((seconds + 25)) env $untuned python -m jspark bench kernels --soak "$seconds" --output "$output/kernels_soak.json"
}

goldens() {
    run 500 $gpu_tests -m "not slow" tests/test_goldens.py tests/test_attention_gpu.py tests/test_landing.py -k "golden or runs or tokens or ends"
}

engine() {
    temperature=$1
    run 580 python -m jspark bench engine --concurrency 1,8,32,64,128,256 --temperature "$temperature" --fixed 4 \
        --no-alone --compare-overlap --device-trace --limit 480 --output "$output/engine_t$temperature.json"
}

drafter() {
    data=$1
    shift
    files="" arms=""
    for file in "$data"/*.jsonl; do files="$files --data $file"; done
    for arm in "$@"; do arms="$arms --speculative-draft-model-path $arm"; done
    shipped=jspark/checkpoint/shipped/smollm2-135m-dspark
    run 200 python -m jspark calibrate --model-path smollm2-135m --speculative-draft-model-path $shipped \
        --num-prompts 2000 --output "$output/smollm2-135m-dspark-sts.json"
    # Line 120 of arena-hard-v2 does not fit the context.
    # shellcheck disable=SC2086
    run 380 python -m jspark eval --model-path smollm2-135m $files --speculative-draft-model-path shipped=$shipped $arms \
        --speculative-dspark-confidence-sts-path "shipped=$output/smollm2-135m-dspark-sts.json" \
        --limit 100 --temperature 1 --temperature 0 --max-new-tokens 512 --output "$output/eval_smollm2"
}

case $part in
attention | steps | soak | goldens | engine | drafter) "$part" "$@" ;;
*)
    echo "no part is called $part: attention, steps, soak, goldens, engine or drafter" >&2
    exit 2
    ;;
esac
