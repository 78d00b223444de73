package main

import "github.com/IBM/sarama"

var sarama_ = client{
	consume: func(at where, show func(int64, []byte, []byte) bool) error {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Consumer.Fetch.Default = at.fetchBytes
		config.Consumer.Return.Errors = true
		c, err := sarama.NewConsumer(at.brokers, config)
		if err != nil {
			return err
		}
		p, err := c.ConsumePartition(at.topic, at.partition, at.offset)
		if err != nil {
			return err
		}
		for {
			select {
			case m := <-p.Messages():
				if show(m.Offset, m.Key, m.Value) {
					return nil
				}
			case failed := <-p.Errors():
				return failed
			}
		}
	},
	produce: func(at where) (func([]byte, []byte) (int64, error), error) {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Producer.RequiredAcks = sarama.WaitForAll
		config.Producer.Idempotent = true
		config.Net.MaxOpenRequests = 1
		config.Producer.Return.Successes = true
		config.Producer.Partitioner = sarama.NewManualPartitioner
		c, err := sarama.NewSyncProducer(at.brokers, config)
		return func(key, value []byte) (int64, error) {
			m := &sarama.ProducerMessage{Topic: at.topic, Partition: at.partition}
			if key != nil {
				m.Key = sarama.ByteEncoder(key)
			}
			if value != nil {
				m.Value = sarama.ByteEncoder(value)
			}
			_, offset, err := c.SendMessage(m)
			return offset, err
		}, err
	},
}
