#!/bin/sh
# The shipped drafter of smollm2-135m and the arms it is compared with. Run it again to go on where it stopped.
#   benchmarks/train_smollm2.sh FOLDER EVALUATION.jsonl …
# With two GPUs, text is written on both and two arms train side by side; with one, everything runs in turn.
set -eu
work=$1
shift
exclude=""
for file in "$@"; do exclude="$exclude --exclude $file"; done
model="--model-path smollm2-135m"
gpus=$(python -c "import jax; print(min(2, len(jax.devices())))")
mkdir -p "$work"

text() {
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$(($1 % gpus)) jspark data $model --output "$work/text$1" --tokens 24000000 \
        --max-answer-tokens 640 --seed $((11 + $1)) $exclude
}

arm() {
    gpu=$1 name=$2
    shift 2
    resume=""
    [ -f "$work/$name/run.json" ] && resume=--resume
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$((gpu % gpus)) jspark train $model --data "$work/text0" --data "$work/text1" \
        --output "$work/$name" --devices 1 --markov-rank 32 --mask-token-id 16 --steps 1600 \
        --learning-rate 1e-3 --log-every 20 $resume "$@"
}

first() { text 0; }
second() { text 1; }
if [ "$gpus" = 2 ]; then first & second & wait; else first; second; fi
one() { arm 0 dspark --algorithm DSPARK; arm 0 dspark-rnn --algorithm DSPARK --head rnn; }
two() { arm 1 dflash --algorithm DFLASH; arm 1 eagle3 --algorithm EAGLE3; }
if [ "$gpus" = 2 ]; then one & two & wait; else one; two; fi
jspark convert "$work/dspark/drafter" "$work/smollm2-135m-dspark" --dtype int8 --overwrite
