"""A folder that servers on several hosts have mounted: CephFS, Lustre, NFS, JuiceFS."""
