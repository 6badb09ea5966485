-- Registers an adapter that a store has lost with its memory. ARGV: name, digest, serialised RegisteredAdapter.
-- Returns 1; 0 where the store knows what became of the name.
if redis.call('HEXISTS', ADAPTERS, ARGV[1]) == 1 then return 0 end
if redis.call('HEXISTS', REMOVED_ADAPTERS, ARGV[1] .. ' ' .. ARGV[2]) == 1 then return 0 end
redis.call('HSET', ADAPTERS, ARGV[1], ARGV[2] .. ARGV[3])
changed('adapters')
return 1
