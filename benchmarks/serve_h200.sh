#!/bin/sh
# The server on one H200 → h200/serve_*.json: start to first token, cold and warm, of the default model with its
# drafter and of Qwen3-8B shapes (random weights, untrained drafter), and closed loops over HTTP beside the engine
# alone. From the root of the repository; each part is ended after its seconds, the whole takes under eight minutes.
#
#   benchmarks/serve_h200.sh                     all of it
#   benchmarks/serve_h200.sh starts              one part: starts, starts_8b, sweep
#   SHAPE=tiny OUTPUT=/tmp/x benchmarks/serve_h200.sh    a rehearsal on a CPU
set -u
output=${OUTPUT:-../h200} # as seen from benchmarks/shapes
shape=${SHAPE:-qwen3-8b}
if [ "$shape" = tiny ]; then
    served="--model-path tiny --load-format dummy --speculative-draft-model-path untrained --context-length 256"
    clients=1,4 requests=16 new=8
else
    served="--model-path smollm2-135m --speculative-algorithm DSPARK --context-length 2048"
    clients=1,8,32,64,128,256 requests=1024 new=128
fi
buckets=8,64,256
[ "$shape" = tiny ] && buckets=4
random="--model-path $shape --load-format dummy --speculative-draft-model-path untrained --context-length 2048"
part=${1:-all}
cd benchmarks/shapes || exit 1

bench() { # name, seconds, flags…
    name=$1 limit=$2
    shift 2
    echo "── $name"
    timeout "$limit" python -m jspark bench serve --output "$output/$name.json" "$@" || echo "── $name: exit code $?"
}

[ "$part" = all ] || [ "$part" = starts ] &&
    bench serve_start_smollm2 100 --starts --concurrency none --server="$served"
[ "$part" = all ] || [ "$part" = starts_8b ] &&
    bench serve_start_qwen3_8b 180 --starts --concurrency none --server="$random"
[ "$part" = all ] || [ "$part" = sweep ] &&
    bench serve_sweep_smollm2 190 --engine-alone --concurrency "$clients" --requests "$requests" --requests-per-client 8 --cancelled 0 \
        --prompts 32 --prompt-tokens 128 --new-tokens "$new" \
        --server="$served --max-running-requests ${buckets##*,} --row-buckets $buckets"
exit 0
