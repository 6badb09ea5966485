-- Registers an adapter, or replaces the one with its name.
-- ARGV: name, digest, serialised RegisteredAdapter, the greatest number of adapters, 1 if Redis has lost it or else 0. One
-- that was lost stays out if an adapter with its name is registered, or this one was removed.
-- Returns 1; 0 if that number is reached.
local before = redis.call('HGET', ADAPTERS, ARGV[1])
local entry = ARGV[2] .. ARGV[3]
local is_removed = redis.call('HEXISTS', REMOVED_ADAPTERS, ARGV[1] .. ' ' .. ARGV[2]) == 1
if ARGV[5] == '1' and (before or is_removed) then return 1 end
if before == entry then return 1 end
if not before and redis.call('HLEN', ADAPTERS) >= tonumber(ARGV[4]) then return 0 end
if before then take_out(ARGV[1], before) end
redis.call('HDEL', REMOVED_ADAPTERS, ARGV[1] .. ' ' .. ARGV[2])
redis.call('HSET', ADAPTERS, ARGV[1], entry)
changed('adapters', READY)
return 1
