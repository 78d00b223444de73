// Stock Go clients of Kafka behind one command line; the contract is in ../programs.py.
//
//	clients CLIENT consume BOOTSTRAP TOPIC PARTITION OFFSET END FETCH_BYTES
//	clients CLIENT produce BOOTSTRAP TOPIC PARTITION
//	clients CLIENT group BOOTSTRAP TOPIC GROUP COUNT
//	clients CLIENT time BOOTSTRAP TOPIC PARTITION TIMESTAMP
//	clients CLIENT load BOOTSTRAP TOPIC METADATA_MS TIMEOUT_MS
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

type record struct {
	Offset int64   `json:"offset"`
	Key    *string `json:"key"`
	Value  *string `json:"value"`
}

type member struct {
	brokers []string
	topic   string
	group   string
}

type grouped struct {
	Partition int32 `json:"partition"`
	record
}

type where struct {
	brokers    []string
	topic      string
	partition  int32
	offset     int64
	end        int64
	fetchBytes int32
}

type loaded struct {
	Value     string `json:"value"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
	Error     string `json:"error,omitempty"`
}

type loading struct {
	brokers  []string
	topic    string
	metadata time.Duration
	timeout  time.Duration
}

type client struct {
	// consume calls show with each record and returns when show says that it was the last one.
	consume func(at where, show func(offset int64, key, value []byte) bool) error
	// produce returns what sends one record and waits for its offset.
	produce func(at where) (func(key, value []byte) (int64, error), error)
	// group calls show with each record until it says that it was the last one, and commits them.
	group func(as member, show func(partition int32, offset int64, key, value []byte) bool) error
	// time returns the offset of the first record that is not older than so many milliseconds.
	time func(at where, ms int64) (int64, error)
	// load returns what sends one record by its key without waiting, and what waits for all of
	// them; tell is called once for each, from one goroutine at a time.
	load func(at loading, tell func(loaded)) (func(key, value string), func() error, error)
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

func milliseconds(s string) time.Duration {
	return time.Duration(number(s)) * time.Millisecond
}

func load(chosen client, words []string) {
	at := loading{strings.Split(words[0], ","), words[1], milliseconds(words[2]), milliseconds(words[3])}
	out := json.NewEncoder(os.Stdout)
	send, end, err := chosen.load(at, func(told loaded) { fail(out.Encode(told)) })
	fail(err)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var given record
		fail(json.Unmarshal(lines.Bytes(), &given))
		send(*given.Key, *given.Value)
	}
	fail(end())
}

func main() {
	words := os.Args[1:]
	chosen := clients[words[0]]
	if words[1] == "load" {
		load(chosen, words[2:])
		return
	}
	out := json.NewEncoder(os.Stdout)
	brokers := strings.Split(words[2], ",")
	if words[1] == "group" {
		left := number(words[5])
		as := member{brokers, words[3], words[4]}
		fail(chosen.group(as, func(partition int32, offset int64, key, value []byte) bool {
			fail(out.Encode(grouped{partition, record{offset, text(key), text(value)}}))
			left--
			return left == 0
		}))
		return
	}
	at := where{brokers, words[3], int32(number(words[4])), 0, 0, 0}
	if words[1] == "time" {
		offset, err := chosen.time(at, number(words[5]))
		fail(err)
		fail(out.Encode(map[string]int64{"offset": offset}))
		return
	}
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
