package main

import (
	"context"

	"github.com/segmentio/kafka-go"
)

var kafkaGo = client{
	consume: func(at where, show func(int64, []byte, []byte) bool) error {
		r := kafka.NewReader(kafka.ReaderConfig{
			Brokers:   at.brokers,
			Topic:     at.topic,
			Partition: int(at.partition),
			MinBytes:  1,
			MaxBytes:  int(at.fetchBytes),
		})
		defer r.Close()
		if err := r.SetOffset(at.offset); err != nil {
			return err
		}
		for {
			m, err := r.ReadMessage(context.Background())
			if err != nil {
				return err
			}
			if show(m.Offset, m.Key, m.Value) {
				return nil
			}
		}
	},
	produce: func(at where) (func([]byte, []byte) (int64, error), error) {
		// Its Writer does not tell offsets; the client below it does.
		c := &kafka.Client{Addr: kafka.TCP(at.brokers...)}
		return func(key, value []byte) (int64, error) {
			m := kafka.Record{}
			if key != nil {
				m.Key = kafka.NewBytes(key)
			}
			if value != nil {
				m.Value = kafka.NewBytes(value)
			}
			done, err := c.Produce(context.Background(), &kafka.ProduceRequest{
				Topic:        at.topic,
				Partition:    int(at.partition),
				RequiredAcks: kafka.RequireAll,
				Records:      kafka.NewRecordReader(m),
			})
			if err == nil {
				err = done.Error
			}
			if err != nil {
				return 0, err
			}
			return done.BaseOffset, nil
		}, nil
	},
}
