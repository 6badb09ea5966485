-- Registers again an adapter that Redis has lost with its data. ARGV: name, digest, serialised RegisteredAdapter.
-- Returns 1; 0 if an adapter with its name is registered, or this one was removed.
if redis.call('HEXISTS', ADAPTERS, ARGV[1]) == 1 then return 0 end
if redis.call('HEXISTS', REMOVED_ADAPTERS, ARGV[1] .. ' ' .. ARGV[2]) == 1 then return 0 end
redis.call('HSET', ADAPTERS, ARGV[1], ARGV[2] .. ARGV[3])
changed('adapters', READY)
return 1
