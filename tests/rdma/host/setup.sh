#!/usr/bin/env bash
# setup.sh: what the emulated host with RDMA devices needs, once. Packages take root; the rest a cache
# directory that may be written. Debian's kernel is unpacked into it, nothing is installed from it.
#   RDMA_HOST_CACHE=/var/cache/objectcache-rdma   half a gigabyte
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cache=${RDMA_HOST_CACHE:-/var/cache/objectcache-rdma}
PATH=$PATH:/usr/sbin:/sbin
packages=(qemu-system-x86 busybox-static kmod cpio iproute2 rdma-core libibverbs1 ibverbs-providers python3-pyverbs)

install_packages() {
    local installed  # dpkg-query fails where it has never heard of one
    installed=$(dpkg-query -W -f '${Status}\n' "${packages[@]}" 2>/dev/null | grep -c '^install ok') || true
    [ "$installed" != "${#packages[@]}" ] || return 0
    [ "$(id -u)" = 0 ] || { echo "these Debian packages are needed, and root to install them: ${packages[*]}" >&2; return 1; }
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
        install -y -qq --no-install-recommends "${packages[@]}" >&2
}

# The cloud kernel has no rdma_rxe; the standard one has. An uncompressed kernel starts at once, where
# unpacking one in the emulated processor takes seconds.
fetch_kernel() {
    local package
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-\)/\1/p' | head -n 1)
    [ -n "$package" ] || { echo "apt knows no linux-image-amd64; run apt-get update" >&2; return 1; }
    version=${package#linux-image-}
    if [ ! -s "$version/vmlinux" ]; then
        rm -rf "$version" download && mkdir download
        (cd download && apt-get -o Acquire::Retries=3 download -qq "$package")
        dpkg-deb -x download/*.deb "$version" && rm -rf download
        depmod -b "$version" "$version"
        # Under its name only when it is whole: a set-up that was ended begins again there.
        /usr/bin/python3 "$here/uncompress_kernel.py" "$version/boot/vmlinuz-$version" "$version/unpacked"
        mv "$version/unpacked" "$version/vmlinux"
    fi
    ln -sfn "$version" kernel
}

# A first file system in memory: busybox, and the modules that it takes to reach the real root.
build_initrd() {
    local root=$cache/initrd module file
    rm -rf "$root" && mkdir -p "$root"/{bin,modules,proc,sys,dev,lower,writable,root}
    cp /bin/busybox "$root/bin/"
    cp "$here/early_init.sh" "$root/init" && chmod 755 "$root/init"
    for module in virtio_pci 9pnet_virtio 9p overlay; do
        modprobe -d "$cache/kernel" -S "$version" --show-depends "$module"
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r file; do
        cp "$file" "$root/modules/"
        basename "$file" >>"$root/modules/order"
    done
    (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >initrd.tmp
    mv initrd.tmp initrd.gz
    rm -rf "$root"
}

install_packages
mkdir -p "$cache"
cd "$cache"
fetch_kernel
build_initrd
echo "the emulated host is ready in $cache: kernel $version"
