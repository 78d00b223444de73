#!/usr/bin/env bash
# peer-kafka.sh start DIR PORT | node DIR N | stop DIR : three nodes of Apache Kafka (KRaft) on 127.0.0.1.
# Node N listens at PORT + 10 * (N - 1), with TLS at 2, SASL at 3 and both at 4 above that; user "alice", password
# "alice-secret", by PLAIN and SCRAM. Needs Java 17. Its jars are in $KAFKA_LIBS, or fetched once by Maven into
# ${XDG_CACHE_HOME:-~/.cache}/raftmq-kafka. Process ids stand in DIR/N.pid.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
D=$2
cache=${XDG_CACHE_HOME:-$HOME/.cache}/raftmq-kafka
L=${KAFKA_LIBS:-$cache/libs}

node() {
  java -Xmx512M -Xms256M -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
    -cp "$L/*" kafka.Kafka "$D/n$1.properties" >>"$D/n$1.log" 2>&1 </dev/null &
  echo $! >"$D/$1.pid"
}

case $1 in
start)
  base=$3
  if ! compgen -G "$L/kafka-clients-*.jar" >/dev/null; then
    mkdir -p "$cache"
    cp "$here/kafka-pom.xml" "$cache/pom.xml"
    (cd "$cache" && mvn -q -B dependency:copy-dependencies -DoutputDirectory=libs)
    L=$cache/libs
  fi
  mkdir -p "$D"
  cat "$here/../client/tls/key.pem" "$here/../client/tls/cert.pem" >"$D/broker.pem"
  voters=1@127.0.0.1:$((base + 1)),2@127.0.0.1:$((base + 11)),3@127.0.0.1:$((base + 21))
  id=$(java -cp "$L/*" kafka.tools.StorageTool random-uuid 2>/dev/null)
  for i in 1 2 3; do
    p=$((base + 10 * (i - 1)))
    cat >"$D/n$i.properties" <<EOF
process.roles=broker,controller
node.id=$i
broker.rack=rack-$i
replica.selector.class=org.apache.kafka.common.replica.RackAwareReplicaSelector
controller.quorum.voters=$voters
listeners=PLAINTEXT://127.0.0.1:$p,CONTROLLER://127.0.0.1:$((p + 1)),TLS://127.0.0.1:$((p + 2)),SASL://127.0.0.1:$((p + 3)),BOTH://127.0.0.1:$((p + 4))
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_PLAINTEXT,BOTH:SASL_SSL
inter.broker.listener.name=PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.location=$D/broker.pem
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
EOF
    for listener in sasl both; do
      cat >>"$D/n$i.properties" <<EOF
listener.name.$listener.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="alice-secret";
listener.name.$listener.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.$listener.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
EOF
    done
    cat >>"$D/n$i.properties" <<EOF
log.dirs=$D/n$i
broker.session.timeout.ms=6000
broker.heartbeat.interval.ms=1000
offsets.topic.replication.factor=3
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=3
transaction.state.log.num.partitions=3
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
auto.create.topics.enable=true
num.partitions=1
default.replication.factor=3
EOF
    java -cp "$L/*" kafka.tools.StorageTool format -t "$id" -c "$D/n$i.properties" \
      --add-scram 'SCRAM-SHA-256=[name=alice,password=alice-secret]' \
      --add-scram 'SCRAM-SHA-512=[name=alice,password=alice-secret]' >"$D/format-$i.log" 2>&1 &
  done
  wait
  for i in 1 2 3; do node $i; done
  ;;
node) node "$3" ;;
stop)
  for i in 1 2 3; do kill -9 "$(cat "$D/$i.pid")" 2>/dev/null || true; done
  rm -rf "$D"
  ;;
esac
