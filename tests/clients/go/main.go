// Stock Go clients of Kafka behind one command line; the contract is in ../programs.py.
//
//	clients CLIENT consume BOOTSTRAP TOPIC PARTITION OFFSET END FETCH_BYTES
//	clients CLIENT produce BOOTSTRAP TOPIC PARTITION
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
)

type record struct {
	Offset int64   `json:"offset"`
	Key    *string `json:"key"`
	Value  *string `json:"value"`
}

type where struct {
	brokers    []string
	topic      string
	partition  int32
	offset     int64
	end        int64
	fetchBytes int32
}

type client struct {
	// consume calls show with each record and returns when show says that it was the last one.
	consume func(at where, show func(offset int64, key, value []byte) bool) error
	// produce returns what sends one record and waits for its offset.
	produce func(at where) (func(key, value []byte) (int64, error), error)
}

var clients = map[string]client{"sarama": sarama_, "franz": franz, "kafka-go": kafkaGo}

func text(data []byte) *string {
	if data == nil {
		return nil
	}
	s := string(data)
	return &s
}

func data(s *string) []byte {
	if s == nil {
		return nil
	}
	return []byte(*s)
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	fail(err)
	return n
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	words := os.Args[1:]
	chosen := clients[words[0]]
	at := where{strings.Split(words[2], ","), words[3], int32(number(words[4])), 0, 0, 0}
	out := json.NewEncoder(os.Stdout)
	if words[1] == "consume" {
		at.offset, at.end, at.fetchBytes = number(words[5]), number(words[6]), int32(number(words[7]))
		fail(chosen.consume(at, func(offset int64, key, value []byte) bool {
			fail(out.Encode(record{offset, text(key), text(value)}))
			return offset >= at.end-1
		}))
		return
	}
	send, err := chosen.produce(at)
	fail(err)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var given record
		fail(json.Unmarshal(lines.Bytes(), &given))
		offset, err := send(data(given.Key), data(given.Value))
		if err != nil {
			fail(out.Encode(map[string]string{"error": err.Error()}))
		} else {
			fail(out.Encode(map[string]int64{"offset": offset}))
		}
	}
}
