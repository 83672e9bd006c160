#!/bin/sh
# Prints the users of the broker for `redis-server --aclfile`: `autotune` for API, tuners and beat, `autotune_node` for
# node workers. Both can do what sending and receiving messages takes, in our queues; only autotune takes from those of
# the tuners. Nobody can flush, configure, save or stop the server, and there is no user without a password.
#   BROKER_PASSWORD_FILE=... NODE_PASSWORD_FILE=... sh users.sh >users.acl
set -eu

hash_of() { # FILE
    secret=$(cat "$1")
    [ -n "$secret" ] || {
        echo "users.sh: $1 is empty" >&2
        exit 1
    }
    printf %s "$secret" | sha256sum | cut -d ' ' -f 1
}

owner=$(hash_of "${BROKER_PASSWORD_FILE:-/run/secrets/broker-password}")
node=$(hash_of "${NODE_PASSWORD_FILE:-/run/secrets/broker-node-password}")
commands='resetchannels +@all -@admin -@dangerous -@pubsub -@scripting +evalsha +script|load'
cat <<EOF
user default off
user autotune on #$owner ~tuner* ~sweep* ~node.* ~_kombu.* ~unacked* $commands
user autotune_node on #$node %W~tuner* ~node.* ~_kombu.* ~unacked* $commands
EOF
