#!/usr/bin/env bash
# run.sh [-t SECONDS] [-c CPUS] [-m MIB] [-n one|pair] [-v] DIR COMMAND...
# Boots an emulated host over this host's own root (read only: what is written there is lost), with DIR
# writable at its own path and as the working directory, lays out RDMA devices (devices.sh), and runs
# COMMAND in it as root. Its stdout, stderr and exit code become this script's; 124: the time limit
# passed; 125: the host ended without an exit code. Variables PYTHON*, LD_*, RDMA_*, UCX_*, NIXL_* and
# OBJECTCACHE_* go along. -v: the kernel's console, in the end. Takes no root and no network.
set -u
here=$(dirname "$(readlink -f "$0")")
cache=${RDMA_HOST_CACHE:-/var/cache/objectcache-rdma}
usage() { sed -n 2,7p "$0" | cut -c 3- >&2; exit 2; }

limit_s=300 cpus=$(nproc) memory_mib=2048 net=one verbose=
while getopts t:c:m:n:v option; do
    case $option in
        t) limit_s=$OPTARG ;;
        c) cpus=$OPTARG ;;
        m) memory_mib=$OPTARG ;;
        n) net=$OPTARG ;;
        v) verbose=1 ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 2 ] || usage
case $net in one | pair) ;; *) usage ;; esac
work=$(readlink -e "$1") || { echo "run.sh: there is no directory $1" >&2; exit 2; }
shift
# The path goes through the kernel's command line and a list of options.
case $work in / | *[!A-Za-z0-9_./+@-]*) echo "run.sh: $work cannot be passed on" >&2; exit 2 ;; esac
[ -e "$cache/initrd.gz" ] || { echo "run.sh: run setup.sh first, there is nothing in $cache" >&2; exit 2; }

run=$(mktemp -d /tmp/rdma-host.XXXXXX)
trap 'rm -rf "$run"' EXIT
cp "$here/init.sh" "$here/devices.sh" "$run/"
printf '%q ' "$@" >"$run/command.sh"
{
    printf 'RDMA_HOST_NET=%q\n' "$net"
    export -p | grep -E '^declare -x (PYTHON|LD_|RDMA_|UCX_|NIXL_|OBJECTCACHE_)[A-Za-z0-9_]*='
} >"$run/environment.sh"

# Both ends of the pipes stay open here until the host has ended; then the readers end.
mkfifo "$run/out" "$run/err"
exec 3<>"$run/out" 4<>"$run/err"
cat "$run/out" 3>&- 4>&- &
cat "$run/err" 3>&- 4>&- >&2 &

# TCG, not KVM: it runs everywhere. Its emulation of pclmulqdq is slower than a CRC by table.
# The timer of an emulated processor fails the kernel's own check when the host is busy.
timeout --foreground -k 5 "$limit_s" qemu-system-x86_64 \
    -accel tcg,thread=multi -cpu max,pclmulqdq=off -M pc -smp "$cpus" -m "$memory_mib" \
    -nodefaults -no-user-config -nographic -no-reboot -nic none \
    -kernel "$cache/kernel/vmlinux" -initrd "$cache/initrd.gz" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check rdma_host.work=$work rdma_host.cache=$cache rdma_host.run=$run" \
    -virtfs local,path=/,mount_tag=host_root,security_model=none,readonly=on,multidevs=remap \
    -virtfs local,path="$work",mount_tag=work,security_model=none,multidevs=remap \
    -virtfs local,path="$run",mount_tag=run,security_model=none \
    -chardev file,id=console,path="$run/console" -serial chardev:console \
    -device virtio-serial,max_ports=4 \
    -chardev file,id=out,path="$run/out" -device virtserialport,chardev=out,nr=1,name=out \
    -chardev file,id=err,path="$run/err" -device virtserialport,chardev=err,nr=2,name=err \
    </dev/null 2>"$run/qemu" 3>&- 4>&-
ended=$?
exec 3>&- 4>&-
wait
grep -v 'terminating on signal' "$run/qemu" >&2
[ -z "$verbose" ] || cat "$run/console" >&2
[ ! -e "$run/exit_code" ] || exit "$(cat "$run/exit_code")"
if [ $ended = 124 ] || [ $ended = 137 ]; then
    echo "run.sh: stopped after $limit_s s" >&2
    exit 124
fi
echo "run.sh: the host ended without an exit code (qemu: $ended); its console:" >&2
tail -n 40 "$run/console" >&2
exit 125
