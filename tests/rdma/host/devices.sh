# The emulated host has no network card. RDMA_HOST_NET says what is laid out in it (sourced by init.sh):
#   one    rxe0 on a dummy interface, 10.77.0.1: processes on it reach each other inside the driver
#   pair   besides, rxe1 10.78.0.1 and rxe2 10.78.0.2 on the ends of a veth pair: what goes between them
#          crosses it, so that a link can be taken down (`ip link set rx1 down`). All in one network
#          namespace: this kernel's rxe hears nothing in others.
# Interfaces are rx0, rx1, rx2. An MTU of 4,200 carries RDMA's 4,096.
ip link add rx0 type dummy
ip link set rx0 mtu 4200 up
ip addr add 10.77.0.1/24 dev rx0
rdma link add rxe0 type rxe netdev rx0

if [ "$RDMA_HOST_NET" = pair ]; then
    ip link add rx1 type veth peer name rx2
    for end in 1 2; do
        ip link set rx$end mtu 4200 up
        ip addr add 10.78.0.$end/32 dev rx$end
    done
    for name in rx1 rx2 all; do
        echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
        echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
    done
    # Both addresses are this host's, and would go through lo: they are local only to what comes in
    # from the pair, and what goes out to them takes the pair.
    ip rule add pref 10 iif rx1 lookup local
    ip rule add pref 11 iif rx2 lookup local
    ip rule add pref 20 to 10.78.0.0/24 lookup 77
    ip rule add pref 1000 lookup local
    ip rule del pref 0
    ip route add 10.78.0.2 dev rx1 src 10.78.0.1 table 77
    ip route add 10.78.0.1 dev rx2 src 10.78.0.2 table 77
    rdma link add rxe1 type rxe netdev rx1
    rdma link add rxe2 type rxe netdev rx2
fi
