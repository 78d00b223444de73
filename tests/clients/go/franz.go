package main

import (
	"context"
	"hash/fnv"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

var franz = client{
	consume: func(at where, show func(int64, []byte, []byte) bool) error {
		// Epoch 0 is what `kgo.EpochOffset{Offset: n}` says: it looks whether records were lost.
		start := kgo.NewOffset().At(at.offset).WithEpoch(0)
		c, err := kgo.NewClient(
			kgo.SeedBrokers(at.brokers...),
			kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{at.topic: {at.partition: start}}),
			kgo.FetchMaxPartitionBytes(at.fetchBytes),
			kgo.FetchMaxBytes(at.fetchBytes),
		)
		if err != nil {
			return err
		}
		defer c.Close()
		for {
			fetches := c.PollFetches(context.Background())
			for _, found := range fetches.Errors() {
				return found.Err
			}
			for _, r := range fetches.Records() {
				if show(r.Offset, r.Key, r.Value) {
					return nil
				}
			}
		}
	},
	produce: func(at where) (func([]byte, []byte) (int64, error), error) {
		c, err := kgo.NewClient(
			kgo.SeedBrokers(at.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		)
		return func(key, value []byte) (int64, error) {
			r := &kgo.Record{Topic: at.topic, Partition: at.partition, Key: key, Value: value}
			done, err := c.ProduceSync(context.Background(), r).First()
			if err != nil {
				return 0, err
			}
			return done.Offset, nil
		}, err
	},
	group: func(as member, show func(int32, int64, []byte, []byte) bool) error {
		c, err := kgo.NewClient(
			kgo.SeedBrokers(as.brokers...),
			kgo.ConsumerGroup(as.group),
			kgo.ConsumeTopics(as.topic),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
			kgo.DisableAutoCommit(),
		)
		if err != nil {
			return err
		}
		defer c.Close()
		var read []*kgo.Record
		for {
			fetches := c.PollFetches(context.Background())
			for _, found := range fetches.Errors() {
				return found.Err
			}
			for _, r := range fetches.Records() {
				read = append(read, r)
				if show(r.Partition, r.Offset, r.Key, r.Value) {
					return c.CommitRecords(context.Background(), read...)
				}
			}
		}
	},
	time: func(at where, ms int64) (int64, error) {
		c, err := kgo.NewClient(kgo.SeedBrokers(at.brokers...))
		if err != nil {
			return 0, err
		}
		defer c.Close()
		partition := kmsg.NewListOffsetsRequestTopicPartition()
		partition.Partition, partition.Timestamp = at.partition, ms
		topic := kmsg.NewListOffsetsRequestTopic()
		topic.Topic = at.topic
		topic.Partitions = append(topic.Partitions, partition)
		req := kmsg.NewPtrListOffsetsRequest()
		req.Topics = append(req.Topics, topic)
		told, err := req.RequestWith(context.Background(), c)
		if err != nil {
			return 0, err
		}
		found := told.Topics[0].Partitions[0]
		return found.Offset, kerr.ErrorForCode(found.ErrorCode)
	},
	load: func(at loading, tell func(loaded)) (func(string, string), func() error, error) {
		// Of a record that failed it does not tell where it was placed.
		var placed sync.Map
		place := func(r *kgo.Record, count int) int {
			hash := fnv.New32a()
			hash.Write(r.Key)
			chosen := int(hash.Sum32() % uint32(count))
			placed.Store(string(r.Value), int32(chosen))
			return chosen
		}
		c, err := kgo.NewClient(
			kgo.SeedBrokers(at.brokers...),
			kgo.RecordPartitioner(kgo.BasicConsistentPartitioner(
				func(string) func(*kgo.Record, int) int { return place },
			)),
			kgo.MetadataMinAge(at.metadata),
			kgo.MetadataMaxAge(at.metadata),
			kgo.RecordDeliveryTimeout(at.timeout),
		)
		if err != nil {
			return nil, nil, err
		}
		always := context.Background()
		// Promises are called one after the other.
		send := func(key, value string) {
			r := &kgo.Record{Topic: at.topic, Key: []byte(key), Value: []byte(value)}
			c.Produce(always, r, func(r *kgo.Record, err error) {
				told := loaded{string(r.Value), -1, r.Offset, ""}
				if chosen, ok := placed.LoadAndDelete(told.Value); ok {
					told.Partition = chosen.(int32)
				}
				if err != nil {
					told.Offset, told.Error = -1, err.Error()
				}
				tell(told)
			})
		}
		return send, func() error { defer c.Close(); return c.Flush(always) }, nil
	},
}
