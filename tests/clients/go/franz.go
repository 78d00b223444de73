package main

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
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
}
