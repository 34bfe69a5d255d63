#!/usr/bin/env bash
# selftest.sh: the emulated host keeps what run.sh promises. About a minute.
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d /tmp/rdma-selftest.XXXXXX)
trap 'rm -rf "$work"' EXIT
failures=0

check() { # NAME EXPECTED ACTUAL
    if [ "$2" = "$3" ]; then
        echo "ok: $1"
    else
        echo "FAILED: $1: expected '$2', got '$3'"
        failures=$((failures + 1))
    fi
}

cat >"$work/report.sh" <<'R'
echo written >file
echo lost >/usr/rdma-selftest || echo "the root is not writable"
echo "argument: $1"
echo "variable: $RDMA_SELFTEST"
echo "devices: $(ls /sys/class/infiniband | tr '\n' ' ')"
echo "interfaces: $(ls /sys/class/net | tr '\n' ' ')"
echo "to stderr" >&2
exit 7
R
out=$(RDMA_SELFTEST="with 'quotes'" "$here/run.sh" -n pair "$work" bash report.sh 'a "b" $c' 2>"$work/stderr")
check "the exit code comes back" 7 $?
check "stderr comes back" "to stderr" "$(cat "$work/stderr")"
check "the directory is written" written "$(cat "$work/file")"
check "the host's root is not" no "$([ -e /usr/rdma-selftest ] && echo yes || echo no)"
check "what the command saw" "argument: a \"b\" \$c
variable: with 'quotes'
devices: rxe0 rxe1 rxe2 
interfaces: lo rx0 rx1 rx2 " "$out"

size=$("$here/run.sh" "$work" head -c 3000001 /dev/zero | wc -c)
check "output is whole" 3000001 "$size"
"$here/run.sh" -t 15 "$work" sleep 100 2>/dev/null
check "the time limit" 124 $?
"$here/run.sh" "$work" bash -c 'echo c >/proc/sysrq-trigger' >/dev/null 2>&1
check "a host that dies" 125 $?
exit $((failures > 0))
