#!/bin/bash
# First process over the real host's root: modules, devices, then the command. `work`, `run` and `cache`
# come from early_init.sh; the command, the layout and the environment are files in `run`.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
ln -sfn /proc/self/fd /dev/fd
ln -sfn fd/0 /dev/stdin
ln -sfn fd/1 /dev/stdout
ln -sfn fd/2 /dev/stderr
ulimit -l unlimited
hostname rdma-host

version=$(uname -r)
mkdir -p "/lib/modules/$version"
mount --bind "$cache/kernel/lib/modules/$version" "/lib/modules/$version"
modprobe -a virtio_console rdma_rxe ib_uverbs veth dummy

# The two output ports, by name: their numbers vary.
for _ in $(seq 50); do
    for name in /sys/class/virtio-ports/*/name; do
        port=/dev/$(basename "${name%/name}")
        case $(cat "$name" 2>/dev/null) in
            out) out=$port ;;
            err) err=$port ;;
        esac
    done
    [ -c "${out:-}" ] && [ -c "${err:-}" ] && break
    sleep 0.1
done

ip link set lo up
source "$run/environment.sh"
source "$run/devices.sh"
cd "$work" || exit
echo "rdma-host: command begins at $(cut -d' ' -f1 /proc/uptime) s" >/dev/ttyS0
bash "$run/command.sh" </dev/null >"$out" 2>"$err"
echo $? >"$run/exit_code.tmp"
mv "$run/exit_code.tmp" "$run/exit_code"
echo "rdma-host: command ended at $(cut -d' ' -f1 /proc/uptime) s" >/dev/ttyS0
sync
echo o >/proc/sysrq-trigger
sleep 5
busybox poweroff -f
