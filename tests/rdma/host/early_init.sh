#!/bin/busybox sh
# First process of the emulated host, from the file system in memory: mounts the real host's root, read
# only, with a layer in memory over it, and the two shared directories, and goes on there.
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs dev /dev
while read -r module; do
    $busybox insmod "/modules/$module" || echo "insmod $module failed"
done </modules/order

for argument in $($busybox cat /proc/cmdline); do
    case $argument in
        rdma_host.work=*) work=${argument#*=} ;;
        rdma_host.run=*) run=${argument#*=} ;;
        rdma_host.cache=*) cache=${argument#*=} ;;
    esac
done

give_up() {
    echo "$1"
    $busybox poweroff -f
}
options=trans=virtio,version=9p2000.L,msize=512000
$busybox mount -t 9p -o "ro,cache=loose,$options" host_root /lower || give_up "no root"
$busybox mount -t tmpfs -o mode=755,size=75% writable /writable
$busybox mkdir /writable/upper /writable/work
$busybox mount -t overlay -o lowerdir=/lower,upperdir=/writable/upper,workdir=/writable/work root /root ||
    give_up "no layer over the root"
$busybox mkdir -p /root/proc /root/sys /root/dev /root/run
$busybox mount -t tmpfs run /root/run
$busybox mkdir -p "/root$work" "/root$run"
$busybox mount -t 9p -o "cache=mmap,$options" work "/root$work" || give_up "no working directory"
$busybox mount -t 9p -o "cache=none,$options" run "/root$run" || give_up "no run directory"
for mounted in proc sys dev; do
    $busybox mount --move "/$mounted" "/root/$mounted"
done
export work run cache
exec $busybox switch_root /root /bin/bash "$run/init.sh"
