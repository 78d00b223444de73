// Transactions of franz-go for ../transactional.py: a JSON line in, one out.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

type asked struct {
	Do        string   `json:"do"`
	Bootstrap string   `json:"bootstrap"`
	Producer  string   `json:"producer"`
	ID        string   `json:"id"`
	TimeoutMs int      `json:"timeout_ms"`
	RequestMs int      `json:"request_ms"`
	Topic     string   `json:"topic"`
	Values    []string `json:"values"`
	Until     *string  `json:"until"`
	Isolation string   `json:"isolation"`
	QuietMs   int      `json:"quiet_ms"`
	Source    string   `json:"source"`
	Target    string   `json:"target"`
	Group     string   `json:"group"`
	Count     int      `json:"count"`
}

type answer struct {
	Values []string `json:"values"`
	Error  string   `json:"error,omitempty"`
}

var producers = map[string]*kgo.Client{}
var always = context.Background()

func main() {
	lines := bufio.NewScanner(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var a asked
		err := json.Unmarshal(lines.Bytes(), &a)
		told := answer{Values: []string{}}
		if err == nil {
			told.Values, err = obey(a)
		}
		if err != nil {
			told.Error = err.Error()
		}
		if err := out.Encode(told); err != nil {
			os.Exit(1)
		}
	}
}

func obey(a asked) ([]string, error) {
	producer := producers[a.Producer]
	switch a.Do {
	case "open":
		return nil, open(a)
	case "begin":
		return nil, producer.BeginTransaction()
	case "send":
		return nil, producer.ProduceSync(always, records(a.Topic, a.Values)...).FirstErr()
	case "commit":
		return nil, producer.EndTransaction(always, kgo.TryCommit)
	case "abort":
		return nil, producer.EndTransaction(always, kgo.TryAbort)
	case "read":
		return read(a)
	case "copy":
		return nil, copyAll(a)
	case "reassign", "cancel", "moves":
		return administer(a)
	}
	return nil, fmt.Errorf("no such command: %s", a.Do)
}

func records(topic string, values []string) []*kgo.Record {
	var made []*kgo.Record
	for _, value := range values {
		made = append(made, &kgo.Record{Topic: topic, Value: []byte(value)})
	}
	return made
}

func settings(a asked) []kgo.Opt {
	timeout := time.Duration(a.TimeoutMs) * time.Millisecond
	if timeout == 0 {
		timeout = time.Minute
	}
	return []kgo.Opt{
		kgo.SeedBrokers(strings.Split(a.Bootstrap, ",")...),
		kgo.TransactionalID(a.ID),
		kgo.TransactionTimeout(timeout),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(0),
	}
}

func open(a asked) error {
	opts := settings(a)
	if a.RequestMs != 0 {
		opts = append(opts, kgo.RequestTimeoutOverhead(time.Duration(a.RequestMs)*time.Millisecond))
	}
	made, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	producers[a.Producer] = made
	_, _, err = made.ProducerID(always)
	return err
}

func isolation(name string) kgo.IsolationLevel {
	if name == "read_committed" {
		return kgo.ReadCommitted()
	}
	return kgo.ReadUncommitted()
}

func read(a asked) ([]string, error) {
	start := kgo.NewOffset().AtStart()
	reader, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(a.Bootstrap, ",")...),
		kgo.FetchIsolationLevel(isolation(a.Isolation)),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{a.Topic: {0: start}}),
	)
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	found := []string{}
	for last := time.Now(); ; {
		ctx, cancel := context.WithTimeout(always, 200*time.Millisecond)
		fetches := reader.PollFetches(ctx)
		cancel()
		for _, r := range fetches.Records() {
			found = append(found, string(r.Value))
			last = time.Now()
			if a.Until != nil && string(r.Value) == *a.Until {
				return found, nil
			}
		}
		quiet := time.Since(last)
		if a.Until == nil && quiet > time.Duration(a.QuietMs)*time.Millisecond {
			return found, nil
		}
		if quiet > time.Minute {
			return nil, fmt.Errorf("no %s in %v", *a.Until, found)
		}
	}
}

func copyAll(a asked) error {
	session, err := kgo.NewGroupTransactSession(append(settings(a),
		kgo.ConsumerGroup(a.Group),
		kgo.ConsumeTopics(a.Source),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.RequireStableFetchOffsets(),
	)...)
	if err != nil {
		return err
	}
	defer session.Close()
	turn := 0
	for done := 0; done < a.Count; {
		fetches := session.PollRecords(always, 2)
		for _, found := range fetches.Errors() {
			return found.Err
		}
		var values []string
		for _, r := range fetches.Records() {
			values = append(values, "<"+string(r.Value)+">")
		}
		if len(values) == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return err
		}
		if err := session.ProduceSync(always, records(a.Target, values)...).FirstErr(); err != nil {
			return err
		}
		turn++
		committed, err := session.End(always, kgo.TransactionEndTry(turn%2 == 0))
		if err != nil {
			return err
		}
		if committed {
			done += len(values)
		}
	}
	return nil
}
