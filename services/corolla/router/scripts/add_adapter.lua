-- Registers an adapter, or its name anew. ARGV: name, digest, serialised RegisteredAdapter, how many there may be.
-- Returns 1; 0 where there are as many.
local before = redis.call('HGET', ADAPTERS, ARGV[1])
local entry = ARGV[2] .. ARGV[3]
if before == entry then return 1 end
if not before and redis.call('HLEN', ADAPTERS) >= tonumber(ARGV[4]) then return 0 end
if before then take_out(ARGV[1], before) end
redis.call('HDEL', REMOVED_ADAPTERS, ARGV[1] .. ' ' .. ARGV[2])
redis.call('HSET', ADAPTERS, ARGV[1], entry)
changed('adapters')
return 1
