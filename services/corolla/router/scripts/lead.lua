-- Who asks first leads, as long as it asks again in time. ARGV: task, who asks, ms. Returns 1 if it leads.
local leader = redis.call('GET', lead_key(ARGV[1]))
if leader and leader ~= ARGV[2] then return 0 end
redis.call('SET', lead_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
return 1
