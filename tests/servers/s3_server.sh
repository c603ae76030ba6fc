#!/usr/bin/env bash
# A real S3 server for tests: Ceph's RADOS gateway over one storage daemon that keeps its objects in memory.
#
#   s3_server.sh install             install Debian's packages (as root, with apt-get)
#   s3_server.sh start DIR [PORT]    start in DIR; prints the endpoint when it answers (about 12 s, 1 GB of memory)
#   s3_server.sh stop DIR            stop what was started in DIR, and wait until it is gone
#
# Access key "test", secret "testsecret". Without PORT free ports are chosen. Everything listens on 127.0.0.1 only.
# start is idempotent: where a server already answers in DIR, its endpoint is printed again.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }

# Below those that the kernel gives away, so that nothing takes it before the daemon does, seconds later.
free_port() {
  python3 -c '
import random, socket
while True:
    port = random.SystemRandom().randrange(20_000, 30_000)
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        continue
    break
print(port)'
}

install_packages() {
  if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "s3_server.sh: install needs Debian's apt-get and root; else set PENSTOCK_TEST_S3_ENDPOINT to a server" >&2
    exit 3
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    ceph-mon ceph-mgr ceph-osd ceph-common radosgw curl python3
}

answers() { curl -s -o /dev/null --max-time 5 "$1"; }

# A process is ours only if its command line names our configuration file: numbers of dead processes are used again.
is_ours() { tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -- "$dir/ceph.conf"; }

stop_server() {
  local pids=() file pid
  for file in "$dir"/*.pid; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    if is_ours "$pid"; then pids+=("$pid"); fi
  done
  # The daemons hold nothing worth a clean shutdown, and the monitor takes long over one.
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do
    for _ in $(seq 100); do is_ours "$pid" || break; sleep 0.05; done
  done
  rm -f "$dir"/*.pid "$dir/endpoint"
}

write_configuration() {
  cat >"$dir/ceph.conf" <<EOF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon_host = v2:127.0.0.1:$1
public_addr = 127.0.0.1
ms_bind_ipv6 = false
keyring = $dir/keyring
mon_data = $dir/mon
mgr_data = $dir/mgr
osd_data = $dir/osd
rgw_data = $dir/rgw
run_dir = $dir
admin_socket = $dir/\$name.asok
pid_file = $dir/\$name.pid
log_file = $dir/log/\$name.log
auth_allow_insecure_global_id_reclaim = true
mon_data_avail_warn = 1
mon_data_avail_crit = 1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 4294967296
# tcp_nodelay: without it each response waits 40 ms, for the acknowledgement of its headers.
rgw_frontends = beast endpoint=127.0.0.1:$2 tcp_nodelay=1
EOF
}

start_server() {
  local port=$1 monitor_port osd_uuid conf entity
  if [ -s "$dir/endpoint" ] && answers "$(cat "$dir/endpoint")"; then cat "$dir/endpoint"; return; fi
  stop_server
  rm -rf "$dir"/{mon,mgr,osd,rgw,log,keyring,monmap}
  mkdir -p "$dir"/{mon,mgr,osd,rgw,log}
  monitor_port=$(free_port)
  write_configuration "$monitor_port" "$port"
  conf=(-c "$dir/ceph.conf")
  trap 'stop_server; echo "s3_server.sh: the server did not start; see $dir/log" >&2' ERR

  for entity in mon. client.admin mgr.a osd.0 client.rgw.a; do
    touch "$dir/keyring"
    ceph-authtool "$dir/keyring" --gen-key -n "$entity" \
      --cap mon 'allow *' --cap mgr 'allow *' --cap osd 'allow *' >/dev/null
  done
  monmaptool --create --fsid "$(sed -n 's/^fsid = //p' "$dir/ceph.conf")" \
    --addv a "[v2:127.0.0.1:$monitor_port]" "$dir/monmap" >/dev/null
  ceph-mon "${conf[@]}" -i a --mkfs --monmap "$dir/monmap" --keyring "$dir/keyring"
  ceph-mon "${conf[@]}" -i a

  osd_uuid=$(cat /proc/sys/kernel/random/uuid)
  ceph "${conf[@]}" osd new "$osd_uuid" 0 >/dev/null
  ceph-mgr "${conf[@]}" -i a
  ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$osd_uuid" 2>/dev/null
  ceph-osd "${conf[@]}" -i 0 2>/dev/null
  for _ in $(seq 150); do ceph "${conf[@]}" osd stat | grep -q '1 up' && break; sleep 0.2; done

  radosgw "${conf[@]}" -n client.rgw.a
  for _ in $(seq 300); do answers "http://127.0.0.1:$port" && break; sleep 0.1; done
  answers "http://127.0.0.1:$port"
  radosgw-admin "${conf[@]}" user create --uid=test --display-name=test \
    --access-key=test --secret-key=testsecret >/dev/null 2>&1
  trap - ERR
  echo "http://127.0.0.1:$port" | tee "$dir/endpoint"
}

case ${1:-} in
  install) install_packages ;;
  start | stop)
    [ $# -ge 2 ] || usage
    mkdir -p "$2"
    dir=$(cd "$2" && pwd)
    if [ "$1" = start ]; then start_server "${3:-$(free_port)}"; else stop_server; fi
    ;;
  *) usage ;;
esac
